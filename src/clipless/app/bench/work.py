"""An estimate of how long a benchmark takes, from one plain step of every model."""

from collections.abc import Callable
from dataclasses import dataclass

from clipless.app.bench.problems import Problem
from clipless.app.bench.timing import timed
from clipless.app.bench.ways import plain
from clipless.app.progress import OnProgress

PROCESS_MS, SCALING_MS = 5000.0, 20.0


@dataclass(frozen=True)
class Pilot:
    """A model's size, and the milliseconds of one plain step after the first."""

    parameters: int
    trainable: int
    step_ms: float

    def process_ms(self, steps: int) -> float:
        """The time of a fresh process that imports, builds the model and takes some steps."""
        return PROCESS_MS + steps * self.step_ms


def pilot(problem: Problem) -> Pilot:
    model = problem.build()
    parameters = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    runner = plain(problem)
    timed(runner)
    return Pilot(parameters, trainable, timed(runner)[1])


class ProgressCounter:
    """The work done of all the work, reported after every piece."""

    def __init__(self, total: float, report: OnProgress) -> None:
        self._done, self._total, self._report = 0.0, total, report

    def add(self, what: str, amount: float) -> None:
        self._done += amount
        self._report(what, self._done, self._total)

    def ticker(self, name: str, amount: float) -> Callable[[str], None]:
        """A callback that adds the same amount for every step of a way."""
        return lambda way: self.add(f"{name} {way}", amount)
