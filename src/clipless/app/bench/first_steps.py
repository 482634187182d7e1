"""What the first steps of a run cost, in which it checks itself: each over the least plain step."""

from collections.abc import Callable
from dataclasses import dataclass

from clipless.app.bench.problems import Problem
from clipless.app.bench.timing import timed
from clipless.app.bench.ways import PLAIN, WAYS

STEPS = 9
# Steps whose number is a power of two are checked.
CHECKED = (1, 2, 4, 8)
PRIVATE = "auto-s"


@dataclass(frozen=True)
class FirstSteps:
    """Milliseconds of plain steps, and of private ones by their number in the run, from 1 on: the least of several runs."""

    title: str
    plain_ms: float
    private_ms: tuple[float, ...]

    def over_plain(self, number: int) -> float:
        """
        >>> FirstSteps("mlp", 2.0, (8.0, 6.0)).over_plain(1)
        4.0
        """
        return self.private_ms[number - 1] / self.plain_ms


def first_steps(problem: Problem, runs: int, tick: Callable[[], None] = lambda: None) -> FirstSteps:
    """The first steps of this many fresh runs, alternating with plain ones. One more run is not counted: in a fresh process
    the first step of plain training is slow as well."""
    plain, private = [], []
    for number in range(runs + 1):
        runners = [WAYS[way](problem) for way in (PLAIN, PRIVATE)]
        try:
            times = [[timed(runner)[1] for runner in runners] for _ in range(STEPS)]
        finally:
            for runner in runners:
                runner.close()
        if number:
            plain.append(min(ours for ours, _ in times[1:]))
            private.append([ours for _, ours in times])
        tick()
    least = (round(min(step), 4) for step in zip(*private, strict=True))
    return FirstSteps(problem.title, round(min(plain), 4), tuple(least))
