"""What was released so far, and what that costs."""

from collections.abc import Mapping
from dataclasses import dataclass

from clipless.accounting import checks
from clipless.accounting.accountants import accountant_named
from clipless.accounting.events import StepEvent
from clipless.errors import InvalidArgument, InvalidType


@dataclass(frozen=True, repr=False)
class Spent:
    """What a run has spent at `delta`. Its repr says so when the accountant is an approximation.

    >>> Spent(epsilon=2.98, delta=1e-05, steps=1160, accountant="pld")
    Spent(epsilon=2.98, delta=1e-05, steps=1160, accountant='pld')
    >>> Spent(epsilon=2.9, delta=1e-05, steps=1160, accountant="gdp")
    Spent(epsilon=2.9, delta=1e-05, steps=1160, accountant='gdp', approximation=True)
    """

    epsilon: float
    delta: float
    steps: int
    accountant: str

    @property
    def approximation(self) -> bool:
        """Whether epsilon can lie below the truth: then it is no guarantee."""
        return accountant_named(self.accountant).approximation

    def __repr__(self) -> str:
        note = ", approximation=True" if self.approximation else ""
        fields = f"epsilon={self.epsilon!r}, delta={self.delta!r}, steps={self.steps!r}, accountant={self.accountant!r}"
        return f"Spent({fields}{note})"


class Ledger:
    """An append-only record of released steps. It holds events, never epsilons.

    >>> ledger = Ledger()
    >>> for _ in range(3):
    ...     ledger.record(StepEvent(sample_rate=0.01, gradient_multiplier=1.1))
    >>> ledger
    Ledger(steps=3, groups=1)
    >>> Ledger.from_dict(ledger.to_dict()) == ledger
    True
    >>> Ledger().spent(delta=1e-5)
    Spent(epsilon=0.0, delta=1e-05, steps=0, accountant='pld')
    """

    def __init__(self) -> None:
        self._groups: list[tuple[StepEvent, int]] = []

    def record(self, event: StepEvent) -> None:
        """Write down one step. Call it before the step's result can be seen."""
        if not isinstance(event, StepEvent):
            raise InvalidType(f"a ledger records StepEvent objects, got {event!r}.")
        self._append(event, 1)

    def _append(self, event: StepEvent, count: int) -> None:
        if self._groups and self._groups[-1][0] == event:
            count += self._groups.pop()[1]
        self._groups.append((event, count))

    @property
    def events(self) -> tuple[tuple[StepEvent, int], ...]:
        """The steps in order, equal neighbours counted together."""
        return tuple(self._groups)

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return sum(count for _, count in self._groups)

    def __len__(self) -> int:
        return self.steps

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.events == other.events

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ledger(steps={self.steps}, groups={len(self._groups)})"

    def spent(self, delta: float, accountant: str = "pld") -> Spent:
        """Epsilon at `delta` of everything recorded so far; 0 for an empty ledger."""
        delta = checks.failure_probability(delta)
        chosen = accountant_named(accountant)
        return Spent(chosen.epsilon(self.events, delta), delta, self.steps, chosen.name)

    def to_dict(self) -> dict[str, object]:
        """Plain values, from which `from_dict` makes an equal ledger."""
        return {"events": [{"event": event.to_dict(), "count": count} for event, count in self._groups]}

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> "Ledger":
        """The ledger that `to_dict` wrote."""
        groups = record.get("events")
        if not isinstance(groups, list):
            raise InvalidArgument(f"a ledger has a list 'events', got the fields {sorted(record)}.")
        ledger = cls()
        for group in groups:
            if not isinstance(group, Mapping) or set(group) != {"event", "count"}:
                raise InvalidArgument(f"an entry of a ledger has the fields 'count' and 'event', got {group!r}.")
            ledger._append(StepEvent.from_dict(group["event"]), checks.step_count(group["count"]))
        return ledger
