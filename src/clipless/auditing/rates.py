"""From the errors of an attack to a lower bound on epsilon.

An attack guesses from a score whether a record was present. Its error rates are bounded from above by Clopper-Pearson
intervals, with a threshold chosen on other scores. A mechanism as private as claimed does not allow rates that low.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from clipless.arrays import Floats
from clipless.auditing.family import SampledGaussian
from clipless.errors import InvalidArgument

# The threshold is chosen on a fifth of the scores: 2000 at most, 200 at least, but never more than half.
CHOOSING, MOST_CHOOSING, LEAST_CHOOSING = 0.2, 2000, 200
CAUTION = 0.999  # so that a rate from few scores does not decide the threshold
CANDIDATES = 200
LEAST_SCORES = 20


@dataclass(frozen=True)
class Rates:
    """How often an attack erred: `false_positives` of `negatives` games without the record, `false_negatives` of
    `positives` games with it."""

    false_positives: int
    negatives: int
    false_negatives: int
    positives: int

    def upper(self, confidence: float) -> tuple[float, float]:
        """Both rates are below these with at least this confidence."""
        each = 1 - (1 - confidence) / 2
        return (
            float(clopper_pearson(self.false_positives, self.negatives, each)),
            float(clopper_pearson(self.false_negatives, self.positives, each)),
        )


def clopper_pearson(events: npt.ArrayLike, trials: npt.ArrayLike, confidence: float) -> Floats:
    """An upper bound on a probability, exact at any number of trials: it fails with probability at most 1 - confidence.

    >>> round(float(clopper_pearson(0, 100, 0.95)), 4)
    0.0295
    """
    counts, total = np.asarray(events, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    least = np.where(counts >= total, 1.0, counts + 1)
    return np.where(counts >= total, 1.0, stats.beta.ppf(confidence, least, np.maximum(total - counts, 1.0)))


def rates(outside: Floats, inside: Floats, family: SampledGaussian) -> Rates:
    """The errors of the attack that says "present" above a threshold, on the scores that did not choose the threshold.

    The first scores of each kind choose it, such that the bound found on them is largest.
    """
    if min(len(outside), len(inside)) < LEAST_SCORES:
        raise InvalidArgument(
            f"an audit needs at least {LEAST_SCORES} games with and without the record: play more of them."
        )
    first_out, first_in = (_choosing(len(scores)) for scores in (outside, inside))
    threshold = _best_threshold(outside[:first_out], inside[:first_in], family)
    rest_out, rest_in = outside[first_out:], inside[first_in:]
    return Rates(int((rest_out > threshold).sum()), len(rest_out), int((rest_in <= threshold).sum()), len(rest_in))


def _choosing(scores: int) -> int:
    return min(max(min(int(CHOOSING * scores), MOST_CHOOSING), LEAST_CHOOSING), scores // 2)


def _best_threshold(outside: Floats, inside: Floats, family: SampledGaussian) -> float:
    candidates = np.quantile(np.concatenate([outside, inside]), np.linspace(0.002, 0.998, CANDIDATES))
    above = len(outside) - np.searchsorted(np.sort(outside), candidates, side="right")
    below = np.searchsorted(np.sort(inside), candidates, side="right")
    fpr, fnr = clopper_pearson(above, len(outside), CAUTION), clopper_pearson(below, len(inside), CAUTION)
    found = family.separation(fpr, fnr)
    return float(candidates[int(np.argmax(np.where(found > 0, found, 1 - fpr - fnr)))])


def plain_epsilon(fpr: float, fnr: float, delta: float) -> float:
    """The least epsilon for which (epsilon, delta)-differential privacy allows these rates. Nothing else is assumed.

    >>> round(plain_epsilon(0.1, 0.1, 0.0), 4)
    2.1972
    """
    ratios = [(1 - delta - fnr) / fpr, (1 - delta - fpr) / fnr]
    return max(0.0, *(math.log(ratio) for ratio in ratios if ratio > 0))


def gaussian_pair_mu(outside: Floats, inside: Floats, confidence: float) -> float:
    """A lower bound on the distance between the means of two samples, in standard deviations, if both are normal with the
    same variance: by the noncentral t distribution of their t statistic. 0 if nothing can be said.

    >>> rng = np.random.default_rng(0)
    >>> round(gaussian_pair_mu(rng.normal(size=2000), rng.normal(size=2000) + 1, 0.95), 2)
    0.97
    """
    n_out, n_in = len(outside), len(inside)
    freedom = n_out + n_in - 2
    pooled = ((n_out - 1) * outside.var(ddof=1) + (n_in - 1) * inside.var(ddof=1)) / freedom
    width = math.sqrt(1 / n_out + 1 / n_in)
    if pooled == 0:
        return math.inf if inside.mean() > outside.mean() else 0.0
    t = float((inside.mean() - outside.mean()) / (math.sqrt(pooled) * width))
    low, high = 0.0, max(t, 0.0)
    while high - low > 1e-6 * max(1.0, high):
        middle = (low + high) / 2
        # Beyond 30 degrees of freedom the normal approximation of Johnson and Welch is exact to four digits.
        beyond = special.ndtr((middle - t * (1 - 1 / (4 * freedom))) / math.sqrt(1 + t * t / (2 * freedom)))
        low, high = (middle, high) if beyond < 1 - confidence else (low, middle)
    return low * width
