"""Steps as the accountants see them: what was released, and how often."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clipless.accounting.events import StepEvent

SMALLEST_ROOT = 2.0**-12


class Release(NamedTuple):
    """`steps` Gaussian releases on Poisson batches, with 0 < noise_multiplier < infinity."""

    sample_rate: float
    noise_multiplier: float
    steps: int


def releases(events: Sequence[tuple[StepEvent, int]]) -> tuple[Release, ...]:
    """Equal releases added up, in a canonical order, without those that cost nothing.

    >>> releases([(StepEvent(0.5, 1.0), 2), (StepEvent(0.1, 1.0), 1), (StepEvent(0.5, 1.0), 3)])
    (Release(sample_rate=0.1, noise_multiplier=1.0, steps=1), Release(sample_rate=0.5, noise_multiplier=1.0, steps=5))
    """
    counts: Counter[tuple[float, float]] = Counter()
    for event, count in events:
        z = event.noise_multiplier if event.statistic_multipliers else event.gradient_multiplier
        counts[event.sample_rate, z] += count
    return tuple(Release(q, z, n) for (q, z), n in sorted(counts.items()) if z != math.inf and n > 0)


def coarser(releases: tuple[Release, ...], limit: int) -> tuple[Release, ...]:
    """At most `limit` different releases, each as costly as the costliest of those it replaces: an upper bound.

    Noise multipliers between the same two powers of some root of 2 are merged, and rates likewise if there are many. The
    grid is coarsened until few enough are left; each grid is part of the one before, so a longer history is never merged
    into a cheaper one.
    """
    if len(releases) <= limit:
        return releases
    rates, multipliers, steps = (np.array(column) for column in zip(*releases, strict=True))
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
    return tuple(sorted(map(Release, highest.tolist(), least.tolist(), counts.tolist())))
