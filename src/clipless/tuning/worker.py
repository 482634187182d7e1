"""One run of the search, wherever it happens to be executed."""

import io
import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from clipless import data as data_sets
from clipless.data import Data
from clipless.errors import InvalidArgument
from clipless.training import Progress, Result, Settings, train

# A process has one global generator of torch: threads of a cluster's worker must not share it.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Task:
    """A candidate to run, its place in the draw, and how many records and steps there will be.

    Its settings hold the seed of its noise: they are never printed.
    """

    place: int
    candidate: int
    settings: Settings = field(repr=False)
    data: Data | str = field(repr=False)
    records: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a run came to. One that failed has the worst score, no model, and takes part in the choice all the same.

    Nothing of it is printed: what may be seen is decided by the method of selection.
    """

    place: int
    candidate: int
    score: float = field(default=-math.inf, repr=False)
    weights: bytes = field(default=b"", repr=False)
    details: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def failed(self) -> bool:
        return not self.weights


def run(task: Task, on_step: Callable[[int], None] | None = None) -> Outcome:
    """Train and score one candidate. `on_step` is told the number of steps taken.

    Whatever goes wrong in training is an outcome, not an error: whether it happens may depend on the records. Records
    that are not those of the search are an error.
    """
    with _ONE_AT_A_TIME:
        records = _load(task.data) if isinstance(task.data, str) else task.data
        if len(records.train) != task.records:
            raise InvalidArgument(
                f"a worker found {len(records.train)} training records in {task.data!r} where the search has "
                f"{task.records}: give every worker the same data."
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = train(records, task.settings, _reporter(on_step), group=False)  # each run is one process's
        except Exception:
            return Outcome(task.place, task.candidate)
        return _outcome(task, result)


def _reporter(on_step: Callable[[int], None] | None) -> Callable[[Progress], None] | None:
    if on_step is None:
        return None

    def report(progress: Progress) -> None:
        on_step(progress.step)

    return report


def _outcome(task: Task, result: Result) -> Outcome:
    state = result.model.state_dict()
    finite = all(bool(value.isfinite().all()) for value in state.values() if value.is_floating_point())
    content = io.BytesIO()
    torch.save(state, content)
    details = {
        name: getattr(result, name) for name in ("accuracies", "steps", "seconds", "plan", "ledger", "history", "data")
    }
    score = result.accuracy if finite and math.isfinite(result.accuracy) else -math.inf
    return Outcome(task.place, task.candidate, score, content.getvalue(), details)


@lru_cache(maxsize=1)
def _load(source: str) -> Data:
    return data_sets.load(source)
