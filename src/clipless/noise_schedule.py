"""Noise that changes over a run by a fixed schedule."""

from collections.abc import Sequence

# (noise multiplier relative to the planned one, number of steps), in order. It depends on no data.
NoiseSchedule = Sequence[tuple[float, int]]


def relative_noise(schedule: NoiseSchedule, step: int) -> float:
    """The relative noise multiplier of a step, counted from 0; beyond the end of the schedule, its last one.

    >>> [relative_noise([(1.0, 2), (0.5, 1)], step) for step in range(4)]
    [1.0, 1.0, 0.5, 0.5]
    """
    for relative, count in schedule:
        if step < count:
            return relative
        step -= count
    return schedule[-1][0]
