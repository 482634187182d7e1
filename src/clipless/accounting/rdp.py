"""Rényi accounting by dp-accounting, with orders chosen for the problem at hand."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import dp_accounting
import numpy as np
from dp_accounting.rdp import RdpAccountant

from clipless.accounting.events import sampled_gaussian
from clipless.accounting.release import Release, coarser

SMALL_ORDERS = (1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 16.0)
LARGEST_ORDER = 2**13
RATIOS = tuple(2.0**2.0**-k for k in range(1, 8))
MAX_RELEASES = 32
# dp-accounting sums series in float64 and stops at 1e-13 of the total; a divergence rounded to 0 or below would make it
# report epsilon = 0, so every step is charged more than the rounding can hide.
ROUNDING = 4e-12


def rdp_epsilon(releases: tuple[Release, ...], delta: float) -> float:
    """Epsilon by Rényi DP: an upper bound, within about 1 % of the best over all orders up to `LARGEST_ORDER`.

    Orders that dp-accounting cannot compute drop out, and more than `MAX_RELEASES` different releases are rounded down
    in noise to that many; both leave an upper bound.
    """
    merged = coarser(releases, MAX_RELEASES)
    with _quiet():
        best, order = _best(merged, delta, SMALL_ORDERS)
        while SMALL_ORDERS[-1] <= order < LARGEST_ORDER:
            candidate, higher = _best(merged, delta, (2 * order,))
            if candidate >= best:
                break
            best, order = candidate, higher
        for ratio in RATIOS:
            candidate, neighbour = _best(merged, delta, (_scaled(order, ratio), _scaled(order, 1 / ratio)))
            if candidate < best:
                best, order = candidate, neighbour
        return best


def _scaled(order: float, ratio: float) -> float:
    """An order nearby; a whole number where the series for fractions grow long."""
    scaled = 1 + (order - 1) * ratio
    return scaled if scaled < SMALL_ORDERS[-1] else float(round(scaled))


def _best(releases: tuple[Release, ...], delta: float, orders: Sequence[float]) -> tuple[float, float]:
    accountant = RdpAccountant(orders)
    for release in releases:
        accountant.compose(sampled_gaussian(release.sample_rate, release.noise_multiplier), release.steps)
    steps = sum(release.steps for release in releases)
    accountant.compose(dp_accounting.ZCDpEvent(rho=0.0, xi=ROUNDING), steps)
    epsilon, order = accountant.get_epsilon_and_optimal_order(delta)
    return (math.inf if math.isnan(epsilon) else float(epsilon)), float(order)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what dp-accounting says about orders it leaves out."""

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logger.removeFilter(keep)
