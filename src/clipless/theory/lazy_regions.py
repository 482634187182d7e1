"""AUTO figures 3 and 11: parameters far from the minimum at which the clipped gradient is almost zero.

Both problems have one parameter θ and their minimum at 0, up to sampling. With R below most gradients, Abadi and AUTO-V
count records on either side instead of weighing them, so the sum is flat between the classes; AUTO-S is not.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from clipless.arrays import Floats
from clipless.errors import InvalidArgument
from clipless.theory.rules import ArrayRule, abadi, auto_s, auto_v

FARTHEST = 30.0


@dataclass(frozen=True)
class LogisticBias:
    """log(1 + exp(−y(θ + x))) with x ~ N(y, 1): the bias of a logistic regression whose weight is 1 (AUTO F.1).

    The label of a record alone decides the sign of its gradient, so with balanced labels AUTO-V's sum is zero everywhere.
    """

    x: Floats
    y: Floats

    def gradients(self, theta: float) -> Floats:
        margins = self.y * (theta + self.x)
        found: Floats = -self.y / (1 + np.exp(np.minimum(margins, 700.0)))
        return found


@dataclass(frozen=True)
class Mean:
    """½(θ − x)²: the mean of the records."""

    x: Floats

    def gradients(self, theta: float) -> Floats:
        return theta - self.x


ScalarProblem = LogisticBias | Mean


def logistic_problem(count: int = 10_000, seed: int = 0) -> LogisticBias:
    """`count` records of each class, y = 1 and y = −1."""
    y = np.repeat([1.0, -1.0], count)
    return LogisticBias(np.random.default_rng(seed).normal(y), y)


def mean_problem(count: int = 10_000, seed: int = 0) -> Mean:
    """`count` records of each N(4, 1) and N(−4, 1) (AUTO F.2, which prints the same mean twice)."""
    return Mean(np.random.default_rng(seed).normal(np.repeat([4.0, -4.0], count)))


LOGISTIC_RULES: dict[str, ArrayRule] = {"abadi": abadi, "auto-v": auto_v, "auto-s": auto_s(0.01)}
MEAN_RULES: dict[str, ArrayRule] = {"abadi": abadi, "auto-v": auto_v, "auto-s": auto_s(0.1)}
THRESHOLD = 0.01
# At these the regions of Abadi's rule are those that the paper names, [-2, 2] and (-1, 1).
LOGISTIC_TOLERANCE, MEAN_TOLERANCE = 0.01, 0.001


def clipped_mean(problem: ScalarProblem, rule: ArrayRule, theta: float, threshold: float = THRESHOLD) -> float:
    """The mean of c_i g_i at θ, in units of R: between −1 and 1 whatever the rule."""
    gradients = problem.gradients(theta)
    return float((rule(np.abs(gradients), threshold) * gradients).mean() / threshold)


@dataclass(frozen=True)
class LazyRegion:
    """Where |mean clipped gradient| ≤ tolerance·R; infinite ends where it never exceeds that within ±30."""

    low: float
    high: float
    tolerance: float

    @property
    def width(self) -> float:
        return self.high - self.low


def lazy_region(problem: ScalarProblem, rule: ArrayRule, tolerance: float, threshold: float = THRESHOLD) -> LazyRegion:
    """The interval of θ in which the clipped gradient is at most `tolerance`·R in size, by bracketing roots.

    In both problems the clipped gradient never decreases with θ, so there is one root at either end, or none. Ends are
    accurate to 1e-6. A stretch where AUTO-V's gradient equals the tolerance belongs to the region.
    """

    if tolerance <= 0:
        raise InvalidArgument(f"tolerance must be above 0, got {tolerance}: without one a region is a point or flat.")

    def end(level: float) -> float:
        def above(theta: float) -> float:
            return clipped_mean(problem, rule, theta, threshold) - level

        if above(-FARTHEST) * above(FARTHEST) > 0:
            return math.copysign(math.inf, level)
        return float(brentq(above, -FARTHEST, FARTHEST, xtol=1e-6))

    edge = tolerance * (1 + 1e-9)
    return LazyRegion(end(-edge), end(edge), tolerance)
