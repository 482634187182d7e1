"""Steps as the accountants see them: what was released, and how often."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clipless.accounting.events import StepEvent, joint_multiplier

SMALLEST_ROOT = 2.0**-12


class Release(NamedTuple):
    """`steps` Gaussian releases on Poisson batches, with 0 < noise_multiplier < infinity.

    With `projections` norms are estimated, which makes the gradient's sensitivity random: then `noise_multiplier` is the
    gradient's alone, and `statistic` that of all statistics. Otherwise it is that of everything together.
    """

    sample_rate: float
    noise_multiplier: float
    steps: int
    projections: int = 0
    statistic: float = math.inf


def releases(events: Sequence[tuple[StepEvent, int]]) -> tuple[Release, ...]:
    """Equal releases added up, in a canonical order, without those that cost nothing.

    >>> found = releases([(StepEvent(0.5, 1.0), 2), (StepEvent(0.1, 1.0), 1), (StepEvent(0.5, 1.0), 3)])
    >>> [(release.sample_rate, release.noise_multiplier, release.steps) for release in found]
    [(0.1, 1.0, 1), (0.5, 1.0, 5)]
    """
    counts: Counter[tuple[float, float, int, float]] = Counter()
    for event, count in events:
        if event.projections is not None and event.gradient_multiplier != math.inf:
            statistic = joint_multiplier(math.inf, *event.statistic_multipliers)
            counts[event.sample_rate, event.gradient_multiplier, event.projections, statistic] += count
            continue
        z = event.noise_multiplier if event.statistic_multipliers else event.gradient_multiplier
        counts[event.sample_rate, z, 0, math.inf] += count
    found = ((key, n) for key, n in sorted(counts.items()) if key[1] != math.inf and n > 0)
    return tuple(Release(q, z, n, r, statistic) for (q, z, r, statistic), n in found)


def coarser(releases: tuple[Release, ...], limit: int) -> tuple[Release, ...]:
    """At most `limit` different releases, each as costly as the costliest of those it replaces: an upper bound.

    Noise multipliers between the same two powers of some root of 2 are merged, and rates likewise if there are many. The
    grid is coarsened until few enough are left; each grid is part of the one before, so a longer history is never merged
    into a cheaper one. Releases that differ in projections or statistic are merged apart, each kind to its part of `limit`.
    """
    if len(releases) <= limit:
        return releases
    kinds = sorted({release[3:] for release in releases})
    merged = (_merged([r for r in releases if r[3:] == kind], max(1, limit // len(kinds))) for kind in kinds)
    return tuple(release for one in merged for release in one)


def _merged(releases: list[Release], limit: int) -> tuple[Release, ...]:
    rates, multipliers, steps, *_ = (np.array(column) for column in zip(*releases, strict=True))
    distinct_rates, which_rate = np.unique(rates, return_inverse=True)
    many_rates = len(distinct_rates) > limit // 4
    root = 1024.0
    while True:
        down = np.floor(np.log2(multipliers) * root).astype(np.int64)
        up = np.ceil(np.log2(rates) * root).astype(np.int64) if many_rates else which_rate
        keys, where = np.unique((down - down.min()) * (np.ptp(up) + 1) + (up - up.min()), return_inverse=True)
        if len(keys) <= limit or root < SMALLEST_ROOT:
            break
        root /= 2
    counts, highest, least = np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys)), np.full(len(keys), math.inf)
    np.add.at(counts, where, steps)
    np.maximum.at(highest, where, rates)
    np.minimum.at(least, where, multipliers)
    kind, rows = releases[0][3:], zip(highest.tolist(), least.tolist(), counts.tolist(), strict=True)
    return tuple(sorted(Release(*row, *kind) for row in rows))
