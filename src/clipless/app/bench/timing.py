"""Times of several ways, which take their steps in turn in one process, so that disturbances hit all of them.

The clock runs from `zero_grad()` to the end of the optimizer's step. Drawing the batch is timed separately.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from clipless.app.bench.ways import PLAIN, Runner

FEWEST_ROUNDS = 3


@dataclass
class Series:
    """The times of one way by round; a way that is too slow for its budget misses the later rounds."""

    step_ms: dict[int, float] = field(default_factory=dict)
    draw_ms: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.step_ms.values()) / 1000


def order(ways: int, round_number: int) -> list[int]:
    """The order of the ways in a round. Over as many rounds as there are ways (twice as many for an odd number), each is
    once in every place and follows every other equally often, so none always inherits the same cache.

    >>> [order(4, number) for number in range(4)]
    [[0, 1, 3, 2], [1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1]]
    """
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(ways)]
    turn = [(offset + round_number) % ways for offset in zigzag]
    return turn[::-1] if ways % 2 and (round_number // ways) % 2 else turn


def interleave(
    runners: Mapping[str, Runner], rounds: int, budget: float = float("inf"), tick: Callable[[str], None] | None = None
) -> dict[str, Series]:
    """`rounds` steps of every way, in turn; a way that has used up its `budget` of seconds stops after three rounds.

    Plain training never stops early. `tick` is called with the name of the way after every step, skipped ones included.
    """
    names = list(runners)
    series = {name: Series() for name in names}
    for number in range(rounds):
        for place in order(len(names), number):
            name = names[place]
            own = series[name]
            spent = own.seconds > budget and len(own.step_ms) >= FEWEST_ROUNDS
            if name == PLAIN or not spent:
                own.draw_ms[number], own.step_ms[number] = timed(runners[name])
            if tick:
                tick(name)
    return series


def timed(runner: Runner) -> tuple[float, float]:
    """Milliseconds of drawing a batch and of the step on it."""
    start = time.perf_counter()
    batch = runner.draw()
    drawn = time.perf_counter()
    runner.step(*batch)
    end = time.perf_counter()
    return 1000 * (drawn - start), 1000 * (end - drawn)
