"""The Gaussian form of one-run auditing: how far canaries move releases, from the values of their scores, not from guesses.

Canary i has a coordinate of its own. By the claim its release in step t, over the claimed standard deviation of the noise,
is x = Z + a·B if the canary is in and x = Z if it is out, with Z standard normal, B = 1 with probability q (it is drawn) and
a = 1/noise multiplier. What is left open is

    x = s·(Z + κ·a·B),

any size s of the noise, and a canary that moves a release κ times as far, in standard deviations, as is claimed. Its score
is g = Σ_t log(1 − q + q·exp(a·x − a²/2)), the log-likelihood ratio under the claim, which grows with x. The statistic is the
mean score of the canaries that are in minus that of those that are out. Its law under (s, κ) is that of a sum of independent
terms, computed from their characteristic functions: no central limit theorem is applied to steps or canaries. Σx² of the
canaries that are out is s² times a chi-square variable and bounds s from above. The tail of the statistic grows with κ,
since g grows with x, and with s, since g is convex. So the largest κ at which the tail beyond the value seen is below the
level is a lower bound, also for canaries that move releases by different amounts.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import stats

from clipless.accounting import ACCOUNTANTS, StepEvent
from clipless.arrays import Floats
from clipless.errors import InvalidArgument
from clipless.plan import PrivacyPlan

Complex = npt.NDArray[np.complex128]
Steps = tuple[tuple[StepEvent, int], ...]

FOR_SIZE = 0.1  # of the error probability, for the size of the noise; the rest for the scores
LARGEST_KAPPA = 8.0
TOLERANCE = 1e-4
# The inversion, in standard deviations of the statistic: its period, and the distance beyond which a tail is 0 or 1.
PERIOD, FAR = 100.0, 40.0
FREQUENCIES, MORE_FREQUENCIES, NEGLIGIBLE, LEAST = 128, 2048, 1e-10, 1e-300
_NODES: Floats = np.linspace(-9.0, 9.0, 301)
_WEIGHTS: Floats = np.exp(-(_NODES**2) / 2) / np.exp(-(_NODES**2) / 2).sum()


@dataclass(frozen=True)
class CanaryTrace:
    """What this analysis needs besides scores: the claimed steps, and for each canary that is out the sum over all
    steps of its squared releases, in claimed standard deviations."""

    steps: Steps
    squares: Floats


def steps_of(plan: PrivacyPlan) -> Steps:
    """The planned steps, equal neighbours counted together."""
    return tuple((event, count) for event, count in plan.planned().events if isinstance(event, StepEvent))


def log_likelihood(seen: Floats, noise_multiplier: float, sample_rate: float) -> Floats:
    """The log-likelihood ratio of standardised releases for a record that takes part with this probability: the best
    score there is, for one step."""
    mu = 1 / noise_multiplier
    return np.logaddexp(
        np.log1p(-sample_rate) if sample_rate < 1 else -np.inf, np.log(sample_rate) + mu * (seen - mu / 2)
    )


def gauss_kappa(inside: Floats, outside: Floats, trace: CanaryTrace, confidence: float) -> float:
    """A lower bound on κ that holds with this confidence; 0 if nothing can be said, at most `LARGEST_KAPPA`.

    `inside` and `outside` are scores. Assumes that noise is normal, of one size, and independent over coordinates and steps,
    and that a canary that is in takes part in each step with the claimed probability.

    >>> rng = np.random.default_rng(1)
    >>> out, there = rng.normal(size=(2, 3000)) + [[0.0], [0.5]]
    >>> trace = CanaryTrace(((StepEvent(1.0, 2.0), 1),), out**2)
    >>> scores = [log_likelihood(x, 2.0, 1.0) for x in (there, out)]
    >>> 0.8 < gauss_kappa(*scores, trace, 0.95) < 1
    True
    """
    low, high = 0.0, LARGEST_KAPPA
    if not gauss_refutes(low, inside, outside, trace, confidence):
        return low
    if gauss_refutes(high, inside, outside, trace, confidence):
        return high
    while high - low > TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if gauss_refutes(middle, inside, outside, trace, confidence) else (low, middle)
    return low


def gauss_refutes(kappa: float, inside: Floats, outside: Floats, trace: CanaryTrace, confidence: float) -> bool:
    """Whether such scores, or more extreme ones, have a chance below 1 - confidence under this κ and every smaller one."""
    if any(event.projections is not None for event, _ in trace.steps):
        raise InvalidArgument(
            "estimated norms let a record move a release by a random amount: audit gradients='exact'."
        )
    if min(len(inside), len(outside)) == 0:
        return False
    error = 1 - confidence
    size = largest_size(trace, 1 - FOR_SIZE * error)
    seen = float(inside.mean() - outside.mean())
    return tail(seen, kappa, size, len(inside), len(outside), trace.steps) < (1 - FOR_SIZE) * error


def gauss_epsilon(kappa: float, steps: Steps, delta: float) -> float:
    """The epsilon of the gradients alone, had every step 1/κ of its claimed noise; 0 for κ = 0."""
    if kappa == 0:
        return 0.0
    moved = [
        (replace(event, gradient_multiplier=event.gradient_multiplier / kappa, statistic_multipliers=()), count)
        for event, count in steps
    ]
    return ACCOUNTANTS["pld"].epsilon(moved, delta)


def largest_size(trace: CanaryTrace, confidence: float) -> float:
    """An upper bound on s from the squares of canaries that are out, by their chi-square distribution."""
    freedom = len(trace.squares) * sum(count for _, count in trace.steps)
    return math.sqrt(float(trace.squares.sum()) / float(stats.chi2.isf(confidence, freedom)))


def tail(seen: float, kappa: float, size: float, inside: int, outside: int, steps: Steps) -> float:
    """The chance that mean scores of these numbers of canaries, in and out, differ by at least `seen` under (s, κ)."""
    kinds = [_Kind(event, count, kappa, size) for event, count in steps]
    mean = sum(kind.count * (kind.mean_in - kind.mean_out) for kind in kinds)
    spread = math.sqrt(sum(kind.count * (kind.variance_in / inside + kind.variance_out / outside) for kind in kinds))
    if abs(seen - mean) >= FAR * spread:
        return float(seen <= mean)
    for number in (FREQUENCIES, MORE_FREQUENCIES):
        halves = np.arange(number) + 0.5
        u = 2 * np.pi / (PERIOD * spread) * halves
        logs = sum(
            kind.count
            * (inside * _log(kind.transform_in(u / inside)) + outside * _log(kind.transform_out(u / outside)))
            for kind in kinds
        )
        transform = np.exp(logs - 1j * u * (seen - mean))
        if abs(transform[-1]) < NEGLIGIBLE:
            break
    # Gil-Pelaez by the midpoint rule, whose error is the chance of a value half a period away.
    return min(max(0.5 + float((transform.imag / halves).sum()) / math.pi, 0.0), 1.0)


def _log(transform: Complex) -> Complex:
    """The logarithm, with 0, which rounding can produce, replaced by a tiny number."""
    return np.log(transform + LEAST)


class _Kind:
    """Steps of one event: the law of a canary's score in one of them, in and out, minus its mean."""

    def __init__(self, event: StepEvent, count: int, kappa: float, size: float) -> None:
        self.count = count
        self.rate, multiplier = event.sample_rate, event.gradient_multiplier
        out = log_likelihood(size * _NODES, multiplier, self.rate)
        drawn = log_likelihood(size * (_NODES + kappa / multiplier), multiplier, self.rate)
        self.mean_out = float(_WEIGHTS @ out)
        self.mean_in = (1 - self.rate) * self.mean_out + self.rate * float(_WEIGHTS @ drawn)
        self._out = out - self.mean_out
        self._in = out - self.mean_in, drawn - self.mean_in
        self.variance_out = float(_WEIGHTS @ self._out**2)
        missed, there = (float(_WEIGHTS @ part**2) for part in self._in)
        self.variance_in = (1 - self.rate) * missed + self.rate * there

    def transform_in(self, u: Floats) -> Complex:
        missed, there = (np.exp(1j * np.outer(u, part)) @ _WEIGHTS for part in self._in)
        return (1 - self.rate) * missed + self.rate * there

    def transform_out(self, u: Floats) -> Complex:
        """That of the negated score, since the canaries that are out are subtracted."""
        return np.exp(-1j * np.outer(u, self._out)) @ _WEIGHTS
