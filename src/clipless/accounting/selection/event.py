"""A choice among runs as an entry of the ledger."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from clipless import arguments
from clipless.accounting.events import StepEvent, registered
from clipless.accounting.selection.method import Run, SelectionMethod
from clipless.accounting.selection.pricing import METHODS
from clipless.arguments import named, whole
from clipless.errors import InvalidArgument, InvalidType


@registered
@dataclass(frozen=True)
class SelectionEvent:
    """Tuning: what each candidate's run releases, and how one of them was chosen.

    It stands for all runs of the search and goes into the ledger before the first of them starts. `candidates` has each
    kind of run with the number of candidates that have it.
    """

    method: SelectionMethod
    candidates: tuple[tuple[Run, int], ...]
    kind: ClassVar[str] = "selection"

    def __post_init__(self) -> None:
        if sum(count for _, count in self.candidates) != self.method.candidates:
            raise InvalidArgument(f"{self.method} is made for {self.method.candidates} candidates, got another number.")

    @classmethod
    def of(cls, method: SelectionMethod, runs: Sequence[Run]) -> "SelectionEvent":
        """The event of choosing among these runs, one for each candidate."""
        return cls(method, tuple(Counter(runs).items()))

    def epsilon(self, delta: float, accountant: str) -> float:
        """What the whole search costs at `delta`, whichever run was chosen."""
        runs = [run for run, count in self.candidates for _ in range(count)]
        return self.method.epsilon(runs, delta, accountant)

    def to_dict(self) -> dict[str, object]:
        """Plain values, from which `from_dict` makes an equal event."""
        return {
            "method": self.method.name,
            "parameters": self.method.to_dict(),
            "runs": [
                {"candidates": count, "steps": [{"event": event.to_dict(), "count": n} for event, n in run]}
                for run, count in self.candidates
            ],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> "SelectionEvent":
        """The event that `to_dict` wrote; every field is required and checked."""
        method, parameters, runs = _fields(record, "method", "parameters", "runs")
        if not isinstance(parameters, Mapping) or not isinstance(runs, list):
            raise InvalidType("the parameters of a selection event are a mapping, and its runs are a list.")
        chosen = named("selection method", method, METHODS).from_dict(parameters)
        return cls(chosen, tuple(_run_from(run) for run in runs))


def _run_from(record: object) -> tuple[Run, int]:
    count, steps = _fields(record, "candidates", "steps")
    if not isinstance(steps, list):
        raise InvalidType(f"the steps of a run are a list, got {steps!r}.")
    run = []
    for step in steps:
        event, times = _fields(step, "event", "count")
        if not isinstance(event, Mapping):
            raise InvalidType(f"a step of a run is a mapping of its fields, got {event!r}.")
        run.append((StepEvent.from_dict(event), arguments.step_count(times)))
    return tuple(run), whole("candidates", count)


def _fields(record: object, *names: str) -> list[object]:
    if not isinstance(record, Mapping) or set(record) != set(names):
        raise InvalidArgument(f"a selection event has the fields {sorted(names)} here, got {record!r}.")
    return [record[name] for name in names]
