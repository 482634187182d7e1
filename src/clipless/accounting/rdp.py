"""Rényi accounting, with orders chosen for the problem at hand."""

import math
from collections.abc import Sequence

from clipless.accounting.conversion import renyi_epsilon
from clipless.accounting.moments import divergence
from clipless.accounting.release import Release

SMALL_ORDERS = (1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 16.0)
LARGEST_ORDER = 2**13
RATIOS = tuple(2.0**2.0**-k for k in range(1, 8))
# The series are summed in float64 and stop at 1e-13 of the total; a divergence rounded to 0 or below would be reported
# as epsilon = 0, so every step is charged more than the rounding can hide.
ROUNDING = 4e-12


def rdp_epsilon(releases: tuple[Release, ...], delta: float) -> float:
    """Epsilon by Rényi DP: an upper bound, within about 1 % of the best over all orders up to `LARGEST_ORDER`.

    Orders whose series does not converge are left out; the result is still an upper bound.
    """

    def best_of(orders: Sequence[float]) -> tuple[float, float]:
        return min((renyi_epsilon(order, _divergence(releases, order), delta), order) for order in orders)

    best, order = best_of(SMALL_ORDERS)
    while SMALL_ORDERS[-1] <= order < LARGEST_ORDER:
        candidate, higher = best_of((2 * order,))
        if candidate >= best:
            break
        best, order = candidate, higher
    for ratio in RATIOS:
        candidate, neighbour = best_of((_scaled(order, ratio), _scaled(order, 1 / ratio)))
        if candidate < best:
            best, order = candidate, neighbour
    return best


def _divergence(releases: tuple[Release, ...], order: float) -> float:
    """The divergence of all steps together. No step is charged more than one on a full batch, whose divergence is known.
    It is infinite where norms are estimated by projections."""
    if any(release.projections for release in releases):
        return math.inf
    total = sum(n * _charged(divergence(q, z, order) + ROUNDING, order / (2 * z**2)) for q, z, n, *_ in releases)
    return math.inf if math.isnan(total) else total


def _charged(series: float, full_batch: float) -> float:
    return full_batch if math.isnan(series) else min(series, full_batch)


def _scaled(order: float, ratio: float) -> float:
    """A nearby order; an integer where the series for fractional orders grow long."""
    scaled = 1 + (order - 1) * ratio
    return scaled if scaled < SMALL_ORDERS[-1] else float(round(scaled))
