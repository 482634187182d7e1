"""Steps whose norms are estimated by random projections: the sensitivity of such a step is itself random.

The norm of a gradient g is estimated as M = √(mean of ⟨g, u_j⟩² over r normal vectors u_j), so that r·M²/‖g‖² has the
chi-square distribution with r degrees of freedom for any g. A record clipped by M adds at most R·√(r/χ²_r) to the sum, not
R. The vectors do not depend on the data, so the analysis may reveal them: a step is then a Gaussian step whose sensitivity
is R·S with S = √(r/χ²_r) drawn anew, and its hockey-stick divergence is the mean over S of that of Gaussian steps. S is
rounded up to a grid, and what lies beyond the grid is counted as released in clear.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import special

from clipless.accounting import losses
from clipless.arrays import Floats

GRID = 160
# Shares below the least point of the grid have this probability, and are rounded up to it.
BELOW = 1e-3


class Shares(NamedTuple):
    """The distribution of S on a grid, rounded up: `weights[k]` on `values[k]`, in increasing order, and `beyond` above them
    all."""

    values: Floats
    weights: Floats
    beyond: float


def exceeds(projections: int, share: Floats | float) -> Floats:
    """The probability that S is above a share: that χ²_r is below r/share².

    >>> round(float(exceeds(2, 1.0)), 4)
    0.6321
    """
    return np.asarray(special.gammainc(projections / 2, projections / (2 * np.square(share))))


def quantile(projections: int, beyond: float) -> float:
    """The share that S exceeds with this probability, rounded up."""
    return float(math.sqrt(projections / (2 * special.gammaincinv(projections / 2, beyond))) * (1 + 1e-9))


@lru_cache(maxsize=256)
def shares(projections: int, beyond: float) -> Shares:
    """The distribution of S on a grid whose largest point is exceeded with probability `beyond`."""
    values = np.geomspace(quantile(projections, 1 - BELOW), quantile(projections, beyond), GRID)
    above = exceeds(projections, values)
    weights = -np.diff(above, prepend=1.0)
    return Shares(values, np.maximum(weights, 0.0), float(above[-1]))


def multipliers(values: Floats, gradient: float, statistic: float) -> Floats:
    """The noise multiplier of a step, gradient and statistic together, at each share S of the gradient's sensitivity."""
    return np.asarray(((values / gradient) ** 2 + statistic**-2.0) ** -0.5)


def loss_range(
    rate: float, found: Shares, noise: Floats, removing: bool, below: float, above: float
) -> tuple[float, float]:
    """Losses that a step falls below or exceeds with about these probabilities; see `losses.loss_range`."""
    likely = np.concatenate([[1.0], 1 - np.cumsum(found.weights)[:-1]]) >= below
    lows = [losses.loss_range(rate, z, removing, below, above)[0] for z in noise[likely]]
    return min(lows), float(_highest(rate, found, noise, removing, above).max())


def deltas(rate: float, found: Shares, noise: Floats, removing: bool, above: float, epsilons: Floats) -> Floats:
    """An upper bound on the hockey-stick divergence of one step at each epsilon, in increasing order.

    What lies beyond the grid is counted as released in clear where the record is in the batch. At shares where an epsilon is
    hardly ever exceeded, the divergence at a smaller epsilon is used.
    """
    if removing:
        total = found.beyond * np.maximum(rate, -np.expm1(epsilons))
    else:
        total = found.beyond * np.maximum(0.0, 1 - np.exp(np.minimum(epsilons, 700.0)) * (1 - rate))
    highest = _highest(rate, found, noise, removing, above)
    for weight, z, most in zip(found.weights, noise, highest, strict=True):
        if weight > 0:
            end = min(int(np.searchsorted(epsilons, most)) + 1, len(epsilons))
            part = losses.deltas(rate, float(z), removing, epsilons[:end])
            total[:end] += weight * part
            total[end:] += weight * part[-1]
    return np.asarray(np.minimum(total, 1.0))


def _highest(rate: float, found: Shares, noise: Floats, removing: bool, above: float) -> Floats:
    """For each share the loss that is exceeded with at most the probability that is left to it: more for rare ones."""
    each = np.minimum(above / (len(noise) * np.maximum(found.weights, 1e-300)), 1e-2)
    pairs = zip(noise, np.maximum(each, above), strict=True)
    return np.array([losses.loss_range(rate, float(z), removing, 1e-4, float(chance))[1] for z, chance in pairs])
