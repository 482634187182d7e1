"""Grid search: train every candidate, release all runs, pay by plain composition."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from clipless.accounting.accountants import accountant_named
from clipless.accounting.selection.method import Run, fields_of, guarantee
from clipless.arguments import whole
from clipless.errors import InvalidArgument


@dataclass(frozen=True)
class GridSearch:
    """Every candidate is run once, and everything may be seen: all scores, all models."""

    candidates: int
    name: ClassVar[str] = "grid"
    releases_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", whole("candidates", self.candidates))

    @classmethod
    def covering(cls, candidates: int, coverage: float | None = None) -> "GridSearch":
        return cls(candidates)

    @property
    def expected_runs(self) -> float:
        return float(self.candidates)

    @property
    def most_runs(self) -> int:
        return self.candidates

    @property
    def coverage(self) -> float:
        return 1.0

    def epsilon(self, runs: Sequence[Run], delta: float, accountant: str = "pld") -> float:
        """All runs composed by the accountant."""
        if len(runs) != self.candidates:
            raise InvalidArgument(
                f"a grid of {self.candidates} candidates has {self.candidates} runs, got {len(runs)}."
            )
        events = [event for run in runs for event in run]
        return accountant_named(guarantee(accountant)).epsilon(events, delta)

    def run_budget(self, run: Run, delta: float, accountant: str = "pld") -> tuple[float, float]:
        return accountant_named(guarantee(accountant)).epsilon(run, delta), delta

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(range(self.candidates))

    def to_dict(self) -> dict[str, object]:
        return {"candidates": self.candidates}

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> "GridSearch":
        (candidates,) = fields_of(record, "candidates")
        return cls(whole("candidates", candidates))
