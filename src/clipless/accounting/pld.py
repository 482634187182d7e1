"""Privacy loss distributions by dp-accounting, on a grid that fits the problem.

Every grid gives an upper bound (pessimistic connect-the-dots); the choice is only between loose, slow and noisy.
"""

import math
from functools import lru_cache

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

from clipless.accounting.gaussian import gaussian_epsilon
from clipless.accounting.rdp import rdp_epsilon
from clipless.accounting.release import Release, coarser

MAX_RELEASES = 32
MAX_POINTS = 20_000
POINTS_PER_STDDEV = 16
MAX_POINTS_COMPOSED = 100_000  # per standard deviation
TWO_STAGES = 1000
# The share of delta given up to tails that are cut, for a short grid.
TAIL_SHARE = 1e-3
# Measured against extended precision: T-fold composition by Fourier transform misplaces less than 2 * T * 2**-52.
FOURIER_ROUNDING = 4 * 2.0**-52
# Second differences of rounded deltas leave about 0.35 * 2**-53 / interval too much mass on each point.
DIFFERENCE_ROUNDING = 4e-17
MASS_EXCESS = 0.05
MASS_LOSS = 1e-6


def pld_epsilon(releases: tuple[Release, ...], delta: float) -> float:
    """Epsilon by privacy loss distributions: an upper bound, exact for full batches, within about 1 % elsewhere.

    Less tight, and then the lesser of all bounds at hand (Rényi, full batches), where float64 gets in the way: when
    1e-15 * steps approaches delta, and where a step's loss is spread over more scales than `MAX_POINTS` resolve.
    More than `MAX_RELEASES` different releases are rounded down in noise to that many.
    """
    full = gaussian_epsilon(math.hypot(*(math.sqrt(r.steps) / r.noise_multiplier for r in releases)), delta)
    if all(release.sample_rate == 1 for release in releases):
        return full
    merged = coarser(releases, MAX_RELEASES)
    removed, tight = _direction(merged, delta, AdjacencyType.REMOVE, MAX_POINTS)
    added, also_tight = _direction(merged, delta, AdjacencyType.ADD, MAX_POINTS // 8)
    if added > removed and not also_tight:  # adding a record is seldom the worse direction: look closer only then
        added, also_tight = _direction(merged, delta, AdjacencyType.ADD, MAX_POINTS)
    bound = min(full, max(removed, added))
    return bound if tight and (also_tight or added <= removed) else min(bound, rdp_epsilon(releases, delta))


def _direction(
    releases: tuple[Release, ...], delta: float, adjacency: AdjacencyType, points: int
) -> tuple[float, bool]:
    """Epsilon in one direction, and whether its grid was as fine as wanted."""
    noise = FOURIER_ROUNDING * (sum(release.steps for release in releases) + 100)
    if noise > delta / 4:
        return math.inf, False
    ranges = [_loss_range(r, delta, adjacency) for r in releases]
    interval, fine = _interval(releases, ranges, points)
    if not 0 < interval < 500:
        return math.inf, False
    try:
        with np.errstate(all="ignore"):
            composed = _composed(releases, ranges, interval, adjacency, TAIL_SHARE * delta)
            mass = float(composed.get_delta_for_epsilon(-math.inf))
            if not 1 - MASS_LOSS <= mass <= 2:
                return math.inf, False
            return float(composed.get_epsilon_for_delta(delta - noise * mass)), fine and noise < delta / 20
    except (ValueError, OverflowError):  # dp-accounting on numbers that rounding has spoilt
        return math.inf, False


def _composed(
    releases: tuple[Release, ...],
    ranges: list[tuple[float, float]],
    interval: float,
    adjacency: AdjacencyType,
    tail: float,
) -> pld_pmf.PLDPmf:
    total: pld_pmf.PLDPmf | None = None
    for (q, z, count), (low, high) in zip(releases, ranges, strict=True):
        one = _one_step(q, z, adjacency, interval, math.floor(low / interval), math.ceil(high / interval))
        part = _repeated(one.to_dense_pmf(), count, tail / len(releases))
        total = part if total is None else pld_pmf.compose_pmfs(total, part, tail / len(releases))
    return total


def _repeated(one: pld_pmf.PLDPmf, count: int, tail: float) -> pld_pmf.PLDPmf:
    """`count` times the same loss. Many are taken in two stages, since one stage would keep far too wide a window."""
    if count < TWO_STAGES:
        return one.self_compose(count, tail)
    inner = math.isqrt(count)
    outer, rest = divmod(count, inner)
    total = one.self_compose(inner, tail / (4 * outer)).self_compose(outer, tail / 4)
    return pld_pmf.compose_pmfs(total, one.self_compose(rest, tail / 4), tail / 4) if rest else total


@lru_cache(maxsize=4 * MAX_RELEASES)
def _one_step(q: float, z: float, adjacency: AdjacencyType, interval: float, low: int, high: int) -> pld_pmf.PLDPmf:
    mechanism = GaussianPrivacyLoss(z, sampling_prob=q, adjacency_type=adjacency)
    deltas = mechanism.get_delta_for_epsilon(np.arange(low, high + 1) * interval)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas)


def _loss_range(release: Release, delta: float, adjacency: AdjacencyType) -> tuple[float, float]:
    """Least and largest loss of one step worth a grid point.

    All steps together exceed the largest with a chance of `TAIL_SHARE * delta`. Losses below the least are rounded up
    to it, which costs next to nothing in sum.
    """
    q, z, _ = release
    steps = _rounded_up(release.steps)

    def bounds(mass: float) -> tuple[float, float]:
        mechanism = GaussianPrivacyLoss(
            z, log_mass_truncation_bound=math.log(mass), sampling_prob=q, adjacency_type=adjacency
        )
        edges = mechanism.connect_dots_bounds()
        return float(edges.epsilon_lower), float(edges.epsilon_upper)

    return bounds(1e-4 / math.sqrt(steps))[0], bounds(min(TAIL_SHARE * delta / (q * steps), 1e-5))[1]


def _interval(releases: tuple[Release, ...], ranges: list[tuple[float, float]], points: int) -> tuple[float, bool]:
    """The grid interval, and whether it is as fine as one step's loss deserves.

    It has few binary digits, so that every multiple of it is exact.
    """
    steps = sum(release.steps for release in releases)
    stddev = math.sqrt(sum(release.steps * _stddev(release) ** 2 for release in releases) / steps)
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
    """The next power of 4: a growing run keeps its grid, and what was computed on it, for long."""
    return 4 ** math.ceil(math.log(steps, 4))


def _stddev(release: Release) -> float:
    q, z, _ = release
    return min(q * math.sqrt(math.expm1(min(1 / z, 20.0) ** 2)), 1 / z)
