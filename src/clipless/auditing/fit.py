"""Is the noise as claimed? Tests of residuals that should be independent standard normal numbers."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats

from clipless.arrays import Floats, Integers

LEAST_STDDEV = 1e-6
MOST_STEPS = 400
MOST_COORDINATES = 400
# Releases lie on a grid of about 1/64 standard deviations, which a test of the shape sees in many more numbers.
MOST_NUMBERS = 50_000


@dataclass(frozen=True)
class Finding:
    """One test of the noise: how likely is this value, or a worse one, if the noise is as claimed?"""

    test: str
    value: float
    p_value: float
    meaning: str


def gaussian_fit(residuals: Floats, groups: Integers) -> tuple[Finding, ...]:
    """Tests of residuals [steps, coordinates], noise over its claimed standard deviation; `groups` names each coordinate's.

    Mean and variance in every group, the shape of the distribution, the spread of the steps' sizes, and correlation
    between any two steps and any two coordinates. Each p-value is uniform, or larger, if the noise is as claimed.
    """
    return tuple(_tests(residuals, groups))


def _tests(residuals: Floats, groups: Integers) -> Iterator[Finding]:
    for group in np.unique(groups):
        yield from _moments(f"group {group}", residuals[:, groups == group].ravel())
    if float(residuals.std()) < LEAST_STDDEV:  # without noise there are no correlations to compute
        return
    some = residuals.ravel()[:MOST_NUMBERS]
    shape = stats.kstest(some, "norm")
    yield Finding("shape", float(shape.statistic), float(shape.pvalue), "the noise is not normally distributed")
    steps, coordinates = residuals.shape
    sizes = stats.chi2.cdf((residuals**2).sum(1), coordinates)
    spread = stats.kstest(sizes, "uniform")
    yield Finding("size by step", float(spread.statistic), float(spread.pvalue), "the noise varies from step to step")
    yield _correlation("steps", residuals[_spread(steps, MOST_STEPS)])
    yield _correlation("coordinates", residuals[:, :MOST_COORDINATES].T)


def _moments(where: str, values: Floats) -> Iterator[Finding]:
    count = len(values)
    mean = float(values.mean())
    yield Finding(f"mean, {where}", mean, float(2 * stats.norm.sf(abs(mean) * count**0.5)), "the noise is biased")
    square = float((values**2).sum())
    less, more = float(stats.chi2.cdf(square, count)), float(stats.chi2.sf(square, count))
    meaning = "there is less noise than claimed" if less < more else "there is more noise than claimed"
    yield Finding(f"stddev, {where}", (square / count) ** 0.5, min(1.0, 2 * min(less, more)), meaning)


def _correlation(between: str, rows: Floats) -> Finding:
    """The largest correlation of two rows, by Bonferroni over all pairs."""
    number, length = rows.shape
    meaning = f"the noise of different {between} is correlated"
    if number < 2 or length < 8:
        return Finding(f"correlation of {between}", 0.0, 1.0, meaning)
    sizes = np.sqrt((rows**2).sum(1, keepdims=True))
    unit = rows / np.where(sizes == 0, 1.0, sizes)
    products = np.abs(np.triu(unit @ unit.T, k=1))
    largest = min(float(products.max()), 1.0)
    # The square of the cosine of two independent directions is distributed as Beta(1/2, (n-1)/2).
    each = float(stats.beta.sf(largest**2, 0.5, (length - 1) / 2))
    return Finding(f"correlation of {between}", largest, min(1.0, each * number * (number - 1) / 2), meaning)


def _spread(steps: int, most: int) -> Integers:
    """At most this many steps, evenly spaced: noise that repeats after a resume repeats many steps later."""
    return np.unique(np.linspace(0, steps - 1, min(steps, most)).astype(np.int64))
