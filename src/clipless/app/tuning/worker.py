"""One run of a search, in whichever process executes it."""

import io
import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from clipless.app import data as data_sets
from clipless.app.data import Data
from clipless.app.training import TASKS, Result, TrainingProgress, TrainingSettings, train
from clipless.errors import InvalidArgument

# A process has one global generator of torch: threads of a cluster's worker must not share it.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Task:
    """A candidate to run, its place in the draw, and how many records and steps there will be.

    Its settings hold the seed of its noise, so its repr does not show them.
    """

    place: int
    candidate: int
    settings: TrainingSettings = field(repr=False)
    data: Data | str = field(repr=False)
    records: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run. A failed one has the worst score and no model, but still takes part in the choice.

    Its repr shows none of this: the selection method decides what may be seen.
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
    """Train and score one candidate. `on_step` is called with the number of steps taken.

    A failure in training is an outcome, not an error, since it may depend on the records. Other records than those of the
    search are an error.
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
                result = train(records, task.settings, _reporter(on_step), group=False)  # one process trains each run
        except Exception:
            return Outcome(task.place, task.candidate)
        return _outcome(task, result)


def _reporter(on_step: Callable[[int], None] | None) -> Callable[[TrainingProgress], None] | None:
    if on_step is None:
        return None

    def report(progress: TrainingProgress) -> None:
        on_step(progress.step)

    return report


def _outcome(task: Task, result: Result) -> Outcome:
    state = result.model.state_dict()
    finite = all(bool(value.isfinite().all()) for value in state.values() if value.is_floating_point())
    content = io.BytesIO()
    torch.save(state, content)
    details = {
        name: getattr(result, name)
        for name in ("scores", "metric", "steps", "seconds", "plan", "ledger", "history", "data")
    }
    merit = next(task for task in TASKS.values() if task.metric == result.metric).merit(result.score)
    score = merit if finite and math.isfinite(merit) else -math.inf
    return Outcome(task.place, task.candidate, score, content.getvalue(), details)


@lru_cache(maxsize=1)
def _load(source: str) -> Data:
    return data_sets.load(source)
