"""The protocol of all methods of choosing among runs, and helpers they share."""

import random
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from clipless.accounting.accountants import accountant_named
from clipless.accounting.events import StepEvent
from clipless.accounting.release import Release, releases
from clipless.errors import InvalidArgument

Run = tuple[tuple[StepEvent, int], ...]
"""The steps of one training run, equal neighbours counted together."""


class SelectionMethod(Protocol):
    """A method of choosing among `candidates` runs, frozen, with the price of the choice.

    `releases_all` says what the price covers: every run with its score, or the best run and nothing else, not even how
    many runs there were. A run that fails counts as a run with the worst score.
    """

    name: ClassVar[str]
    releases_all: ClassVar[bool]

    @property
    def candidates(self) -> int:
        """Size of the grid."""

    @property
    def expected_runs(self) -> float:
        """How many runs there are on average."""

    @property
    def most_runs(self) -> int | None:
        """How many runs there can be; None without a limit."""

    @property
    def coverage(self) -> float:
        """The chance that the best candidate is run at least once."""

    @classmethod
    def covering(cls, candidates: int, coverage: float | None = None) -> "SelectionMethod":
        """The method for a grid of this size, with that coverage or the default one."""

    def epsilon(self, runs: Sequence[Run], delta: float, accountant: str = "pld") -> float:
        """The total epsilon at `delta`, given what each candidate's run would release. Infinite if there is none."""

    def run_budget(self, run: Run, delta: float, accountant: str = "pld") -> tuple[float, float]:
        """(epsilon, delta) of one run alone, from which the total at `delta` is computed."""

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        """The candidates to run, in order. The guarantee needs `random.SystemRandom()`."""

    def to_dict(self) -> dict[str, object]:
        """Plain values, from which `from_dict` makes an equal method."""

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> "SelectionMethod":
        """The method that `to_dict` wrote."""


def guarantee(accountant: str) -> str:
    """The accountant's name, if its epsilon is an upper bound."""
    chosen = accountant_named(accountant)
    if chosen.approximation:
        raise InvalidArgument(
            f"{accountant} is an approximation that can under-report, and choosing among runs multiplies its error: "
            "take 'pld' or 'rdp'."
        )
    return chosen.name


def distinct(runs: Sequence[Run]) -> list[tuple[Release, ...]]:
    """What the different runs release, each kind once, in order of first appearance."""
    if not runs:
        raise InvalidArgument("a choice needs at least one candidate run.")
    return list(dict.fromkeys(releases(run) for run in runs))


def fields_of(record: Mapping[str, object], *names: str) -> list[object]:
    """The values of exactly these fields."""
    if set(record) != set(names):
        raise InvalidArgument(f"a record of this method has the fields {sorted(names)}, got {sorted(record)}.")
    return [record[name] for name in names]
