"""Privacy loss distributions, discretised and read by dp-accounting, on a grid that fits the problem.

Every grid gives an upper bound (pessimistic connect-the-dots). A coarse grid is loose, a fine one is slow, and in one that
is too fine rounding errors dominate.
"""

import math

import numpy as np

from clipless.accounting import losses, projections
from clipless.accounting.composition import RepeatedLoss, composed, epsilon_at, misplaced
from clipless.accounting.gaussian import gaussian_epsilon
from clipless.accounting.rdp import rdp_epsilon
from clipless.accounting.release import Release
from clipless.arrays import Floats

MAX_POINTS = 80_000
POINTS_PER_STDDEV = 16
MAX_POINTS_COMPOSED = 100_000  # per standard deviation
# The fraction of delta given up to tails that are cut, for a short grid.
TAIL_SHARE = 1e-3
# The fraction of delta given up to random sensitivities beyond a grid of them: its reach shrinks as this grows.
PROJECTION_SHARE = 0.05
# Up to this many different releases get all points, and are composed in numpy's longest floats where that helps.
FEW = 4
# Second differences of rounded deltas leave about 0.35 * 2**-53 / interval too much mass on each point.
DIFFERENCE_ROUNDING = 4e-17
MASS_EXCESS = 0.05
MASS_LOSS = 1e-6
LARGEST_INDEX = 2.0**60


def pld_epsilon(releases: tuple[Release, ...], delta: float) -> float:
    """Epsilon by privacy loss distributions: an upper bound, exact for full batches, within about 2 % elsewhere.

    At rates below 1e-3 it can be up to 4 % too large beyond a million steps; with more than `FEW` kinds of steps, which
    get fewer points, up to 8 % before and 26 % beyond. docs/budget.md has the figures.

    It is less tight, and then the least of all bounds at hand (Rényi, full batches), at the limits of float64: when
    1e-15 * sample_rate * steps approaches delta, and when a step's loss is spread over more scales than `MAX_POINTS`
    resolve.
    """
    if any(release.projections for release in releases):
        return _projected_epsilon(releases, delta)
    full = gaussian_epsilon(math.hypot(*(math.sqrt(r.steps) / r.noise_multiplier for r in releases)), delta)
    if all(release.sample_rate == 1 for release in releases):
        return full
    points = MAX_POINTS if len(releases) <= FEW else MAX_POINTS // 4
    removed, tight = _direction(releases, delta, removing=True, points=points)
    added, also_tight = _direction(releases, delta, removing=False, points=MAX_POINTS // 32)
    if added > removed and not also_tight:  # adding a record is seldom the worse direction: compute it finely only then
        added, also_tight = _direction(releases, delta, removing=False, points=points)
    bound = min(full, max(removed, added))
    return bound if tight and (also_tight or added <= removed) else min(bound, rdp_epsilon(releases, delta))


def _projected_epsilon(releases: tuple[Release, ...], delta: float) -> float:
    """The same if the norms of some steps are estimated. Then there is no Rényi bound, and a bound by full batches only if
    the rarest sensitivities are counted as released in clear."""
    every = sum(release.steps for release in releases)
    beyond = PROJECTION_SHARE * delta / every
    full = math.hypot(*(math.sqrt(r.steps) / _least_multiplier(r, beyond) for r in releases))
    bounds = [_direction(releases, delta, removing=removing, points=MAX_POINTS // 4)[0] for removing in (True, False)]
    return min(gaussian_epsilon(full, (1 - PROJECTION_SHARE) * delta), max(bounds))


def _least_multiplier(release: Release, beyond: float) -> float:
    """The multiplier that a step falls below with this probability."""
    if not release.projections:
        return release.noise_multiplier
    largest = np.array([projections.quantile(release.projections, beyond)])
    return float(projections.multipliers(largest, release.noise_multiplier, release.statistic)[0])


def _direction(releases: tuple[Release, ...], delta: float, *, removing: bool, points: int) -> tuple[float, bool]:
    """Epsilon in one direction, and whether its grid was as fine as wanted."""
    ranges = [_loss_range(release, delta, removing) for release in releases]
    interval, fine = _interval(releases, ranges, points)
    if not 0 < interval < 500 or max(map(abs, sum(ranges, ()))) > interval * LARGEST_INDEX:
        return math.inf, False
    try:
        with np.errstate(all="ignore"):
            pairs = zip(releases, ranges, strict=True)
            parts = [_part(r, low, high, interval, removing, delta) for r, (low, high) in pairs]
            extended = len(parts) <= FEW and misplaced(parts, extended=False) > delta / 20
            noise = misplaced(parts, extended=extended)
            if noise > delta / 2:
                return math.inf, False
            total = composed(parts, TAIL_SHARE * delta, extended=extended)
            mass = float(total.masses.sum()) + total.infinity
            if not 1 - MASS_LOSS <= mass <= 2:
                return math.inf, False
            # Rounding can lose a little mass: rescale the rest.
            found = epsilon_at(total, interval, (delta - noise * mass) * min(1.0, mass))
            return found, fine and noise < delta / 20 and math.isfinite(found)
    except (ValueError, OverflowError):  # spoilt by rounding
        return math.inf, False


def _part(release: Release, low: float, high: float, interval: float, removing: bool, delta: float) -> RepeatedLoss:
    first, last = math.floor(low / interval), math.ceil(high / interval)
    q, z, count, *_ = release
    epsilons = np.arange(first, last + 1, dtype=np.float64) * interval
    if release.projections:
        found, noise, above = _shares(release, delta)
        deltas = projections.deltas(q, found, noise, removing, above, epsilons)
    else:
        deltas = losses.deltas(q, z, removing, epsilons)
    from dp_accounting.pld import pld_pmf  # slow to import

    one = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, first, last, deltas).to_dense_pmf()
    return RepeatedLoss(one._lower_loss, one._probs, one._infinity_mass, count)


def _loss_range(release: Release, delta: float, removing: bool) -> tuple[float, float]:
    """Least and largest loss of one step on the grid.

    All steps together exceed the largest with probability `TAIL_SHARE * delta`. Losses below the least are rounded up
    to it, which adds almost nothing to the sum.
    """
    q, z, count, *_ = release
    below = 1e-4 / math.sqrt(_rounded_up(count))
    if release.projections:
        found, noise, above = _shares(release, delta)
        return projections.loss_range(q, found, noise, removing, below, above)
    return losses.loss_range(q, z, removing, below, _above(release, delta))


def _above(release: Release, delta: float) -> float:
    """The probability with which a step may exceed the largest loss on the grid."""
    return min(TAIL_SHARE * delta / (release.sample_rate * _rounded_up(release.steps)), 1e-5)


def _shares(release: Release, delta: float) -> tuple[projections.Shares, Floats, float]:
    """The random sensitivities of a step with projections, the multiplier at each, and `_above`."""
    beyond = min(PROJECTION_SHARE * delta / (release.sample_rate * _rounded_up(release.steps)), 1e-5)
    found = projections.shares(release.projections, beyond)
    return (
        found,
        projections.multipliers(found.values, release.noise_multiplier, release.statistic),
        _above(release, delta),
    )


def _interval(releases: tuple[Release, ...], ranges: list[tuple[float, float]], points: int) -> tuple[float, bool]:
    """The grid interval, and whether it resolves one step's loss as finely as wanted.

    It has few binary digits, so that every multiple of it is exact.
    """
    steps = sum(release.steps for release in releases)
    stddev = math.sqrt(sum(release.steps * losses.stddev(*release[:2]) ** 2 for release in releases) / steps)
    width = max(high - low for low, high in ranges)
    below = max(-low for low, _ in ranges)
    wanted = min(stddev / POINTS_PER_STDDEV, width / 256)
    affordable = max(
        width / points,
        stddev * math.sqrt(steps) / MAX_POINTS_COMPOSED,
        math.sqrt(max(below, 0.0) * _rounded_up(steps) * DIFFERENCE_ROUNDING / MASS_EXCESS),
    )
    mantissa, exponent = math.frexp(max(wanted, affordable))
    return math.ldexp(round(mantissa * 2**20), exponent - 20), affordable <= wanted


def _rounded_up(steps: int) -> int:
    """The next power of 4, so that the grid changes rarely as a run grows."""
    return 4 ** math.ceil(math.log(steps, 4))
