"""Random stopping (Liu and Talwar, 2019): release the best of a geometric number of runs, at three times the price."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from clipless import arguments
from clipless.accounting.accountants import accountant_named
from clipless.accounting.selection.method import Run, fields_of, guarantee
from clipless.arguments import whole
from clipless.errors import InvalidArgument

# As in DC (Theorem 1): negligible beside any delta.
DELTA2 = 1e-20
ROUNDING = 1e-12


@dataclass(frozen=True)
class LiuTalwar:
    """Draw a candidate, run it, stop with probability `stop_probability`, else again; release the best run so far.

    If each run is (ε₁, δ₁)-private and at most T = ⌈ln(1/δ₂) / stop_probability⌉ are taken, the choice is
    (3ε₁ + 3√(2δ₁), 3√(2δ₁)·T + δ₂)-private. A candidate is drawn uniformly, so the bound on a run is that of the worst.
    The preconditions are checked: a stop probability in (0, 1], δ₁ at most 1/2, δ₂ and the total δ below 1, a bound for the
    run of every candidate, and an accountant whose epsilon is a guarantee.

    >>> LiuTalwar.covering(candidates=10).most_runs
    922
    """

    candidates: int
    stop_probability: float
    delta2: float = DELTA2
    name: ClassVar[str] = "liu-talwar"
    releases_all: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", whole("candidates", self.candidates))
        stop = arguments.real("stop_probability", self.stop_probability)
        if not arguments.SMALLEST <= stop <= 1:
            raise InvalidArgument(
                f"stop_probability must lie in (0, 1], got {stop}: without a chance to stop there is no bound. "
                f"1 / (2 * candidates) is usual, here {1 / (2 * self.candidates):g}."
            )
        delta2 = arguments.real("delta2", self.delta2)
        if not arguments.LEAST_DELTA <= delta2 < 1:
            raise InvalidArgument(
                f"delta2 must lie in (0, 1), got {delta2}: it is the chance to be stopped by the limit on the number of "
                f"runs, and part of the total delta. {DELTA2:g} is usual."
            )
        object.__setattr__(self, "stop_probability", stop)
        object.__setattr__(self, "delta2", delta2)

    @classmethod
    def covering(cls, candidates: int, coverage: float | None = None) -> "LiuTalwar":
        """By default DC's stop probability 1 / (2 · candidates), which tries the best one with a chance of over 2/3."""
        count = whole("candidates", candidates)
        if coverage is None or count == 1:
            return cls(count, 1 / (2 * count))
        miss = 1 - arguments.fraction("coverage", coverage)
        return cls(count, min(1.0, miss / (1 - miss) / (count - 1)))

    @property
    def expected_runs(self) -> float:
        return 1 / self.stop_probability

    @property
    def most_runs(self) -> int:
        return math.ceil(math.log(1 / self.delta2) / self.stop_probability)

    @property
    def coverage(self) -> float:
        others = self.stop_probability * (1 - 1 / self.candidates)
        return 1 - others / (1 / self.candidates + others)

    def run_delta(self, delta: float) -> float:
        """The largest δ₁ that the total leaves to a run; 0 if it leaves none.

        The largest is the best: ε₁ falls as δ₁ grows, and √(2δ₁) adds at most delta / T to the total.
        """
        return max(0.0, (delta - self.delta2) / (3 * self.most_runs)) ** 2 / 2 * (1 - ROUNDING)

    def total(self, run_epsilon: float, run_delta: float) -> tuple[float, float]:
        """(ε, δ) of the choice, given the (ε, δ) that every run keeps. DC, Theorem 1."""
        epsilon, delta = arguments.real("run_epsilon", run_epsilon), arguments.real("run_delta", run_delta)
        if epsilon < 0 or not 0 <= delta <= 0.5:
            raise InvalidArgument(
                f"({epsilon:g}, {delta:g}) is no promise of a run: epsilon is at least 0, delta between 0 and 1/2."
            )
        root = 3 * math.sqrt(2 * delta)
        failure = root * self.most_runs + self.delta2
        if failure >= 1:
            raise InvalidArgument(
                f"a run_delta of {delta:g} makes the total delta {failure:g}, which promises nothing: choose at most "
                f"{self.run_delta(0.5):.2g}."
            )
        return 3 * epsilon + root, failure

    def epsilon(self, runs: Sequence[Run], delta: float, accountant: str = "pld") -> float:
        """Slightly more than three times the worst run's epsilon, at the delta left to a run."""
        if len(runs) != self.candidates:
            raise InvalidArgument(
                f"any of {self.candidates} candidates can be drawn, so each needs a run to be priced by; got {len(runs)}."
            )
        own = self.run_delta(delta)
        if own == 0:
            return math.inf
        return self.total(max(self.run_budget(run, delta, accountant)[0] for run in set(runs)), own)[0]

    def run_budget(self, run: Run, delta: float, accountant: str = "pld") -> tuple[float, float]:
        own = self.run_delta(delta)
        return accountant_named(guarantee(accountant)).epsilon(run, own) if own > 0 else math.inf, own

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        drawn = [rng.randrange(self.candidates)]
        while len(drawn) < self.most_runs and rng.random() >= self.stop_probability:
            drawn.append(rng.randrange(self.candidates))
        return tuple(drawn)

    def to_dict(self) -> dict[str, object]:
        return {"candidates": self.candidates, "stop_probability": self.stop_probability, "delta2": self.delta2}

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> "LiuTalwar":
        candidates, stop, delta2 = fields_of(record, "candidates", "stop_probability", "delta2")
        return cls(
            whole("candidates", candidates),
            arguments.real("stop_probability", stop),
            arguments.real("delta2", delta2),
        )
