"""The privacy loss of one Gaussian step on a Poisson batch, as arrays; dp-accounting computes single numbers.

Removing a record compares x ~ (1 − q)·N(0, σ²) + q·N(1, σ²) with N(0, σ²); adding one, the reverse.
"""

import math

import numpy as np
from scipy import special

from clipless.arrays import Floats


def deltas(sample_rate: float, noise_multiplier: float, removing: bool, epsilons: Floats) -> Floats:
    """The hockey-stick divergence of one step at each epsilon, in increasing order: the delta that each of them needs.

    >>> deltas(0.5, 1.0, True, np.array([-1.0, 0.0, 1.0])).round(4)
    array([0.6321, 0.1915, 0.0289])
    """
    q, z = sample_rate, noise_multiplier
    absent = math.log1p(-q) if q < 1 else -math.inf
    with np.errstate(all="ignore"):
        if removing:
            # The mixture less e^epsilon·N(0) is q·N(1) less a multiple of N(0).
            beyond = epsilons - absent
            log_multiple = epsilons + np.log(-np.expm1(-beyond))
            inner = log_multiple - math.log(q)
            found = q * special.ndtr(0.5 / z - z * inner) - np.exp(
                log_multiple + special.log_ndtr(-0.5 / z - z * inner)
            )
            found = np.where(beyond > 0, found, -np.expm1(epsilons))
        else:
            # N(0) less e^epsilon times the mixture is a multiple of N(0) less e^epsilon·q·N(1).
            multiple = -np.expm1(epsilons + absent)
            inner = epsilons + math.log(q) - np.log(multiple)
            found = multiple * special.ndtr(0.5 / z - z * inner) - np.exp(
                epsilons + math.log(q) + special.log_ndtr(-0.5 / z - z * inner)
            )
            found = np.where(multiple > 0, found, 0.0)
    # Rounding can break the order; raising a delta is on the safe side.
    ordered = np.maximum.accumulate(np.clip(found, 0.0, 1.0)[::-1])[::-1]
    return np.asarray(ordered, dtype=np.float64)


def loss(sample_rate: float, noise_multiplier: float, x: float) -> float:
    """The loss of removing a record at the outcome x; that of adding one is its negative."""
    ratio = (x - 0.5) / noise_multiplier**2
    if sample_rate == 1:
        return ratio
    return float(np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + ratio))


def loss_range(
    sample_rate: float, noise_multiplier: float, removing: bool, below: float, above: float
) -> tuple[float, float]:
    """Losses that one step falls below or exceeds with at most these probabilities."""
    q, z = sample_rate, noise_multiplier
    down, up = z * float(special.ndtri(below)), -z * float(special.ndtri(above))
    if removing:
        return loss(q, z, down), loss(q, z, 1.0 + up)
    return -loss(q, z, -down), -loss(q, z, -up)


def stddev(sample_rate: float, noise_multiplier: float) -> float:
    """About the standard deviation of one step's loss."""
    z = noise_multiplier
    return min(sample_rate * math.sqrt(math.expm1(min(1 / z, 20.0) ** 2)), 1 / z)
