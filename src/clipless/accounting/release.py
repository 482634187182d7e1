"""Steps as the accountants see them: what was released, how often, nothing else."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from clipless.accounting.events import StepEvent


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
        counts[event.sample_rate, event.noise_multiplier] += count
    return tuple(Release(q, z, n) for (q, z), n in sorted(counts.items()) if z != math.inf and n > 0)


def coarser(releases: tuple[Release, ...], limit: int) -> tuple[Release, ...]:
    """At most `limit` different noise multipliers, each rounded down to a power of some root of 2: an upper bound."""
    root = 1024
    merged = releases
    while len({release.noise_multiplier for release in merged}) > limit:
        counts: Counter[tuple[float, float]] = Counter()
        for q, z, n in releases:
            counts[q, min(z, 2.0 ** (math.floor(math.log2(z) * root) / root))] += n
        merged = tuple(Release(q, z, n) for (q, z), n in sorted(counts.items()))
        root //= 2
    return merged
