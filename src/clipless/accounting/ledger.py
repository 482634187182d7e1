"""What was released so far, and what that costs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from clipless import arguments
from clipless.accounting.accountants import accountant_named
from clipless.accounting.events import EVENTS, Event, PricedEvent, StepEvent, event_from
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
        """Whether the true epsilon can be larger than the one stated."""
        return accountant_named(self.accountant).approximation

    def __repr__(self) -> str:
        note = ", approximation=True" if self.approximation else ""
        fields = f"epsilon={self.epsilon!r}, delta={self.delta!r}, steps={self.steps!r}, accountant={self.accountant!r}"
        return f"Spent({fields}{note})"


class Ledger:
    """An append-only record of what was released. It holds events, never epsilons.

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
        self._groups: list[tuple[Event, int]] = []
        self._steps = 0

    def record(self, event: Event, count: int = 1) -> None:
        """Record an event, or several equal ones. Call it before their result can be seen."""
        if EVENTS.get(getattr(event, "kind", "")) is not type(event):
            raise InvalidType(f"a ledger records StepEvent objects and other registered events, got {event!r}.")
        if type(count) is not int or count != 1:
            count = arguments.step_count(count)
        if isinstance(event, StepEvent):
            self._steps += count
        if self._groups and self._groups[-1][0] == event:
            count += self._groups.pop()[1]
        self._groups.append((event, count))

    @property
    def events(self) -> tuple[tuple[Event, int], ...]:
        """Everything in order, equal neighbours counted together."""
        return tuple(self._groups)

    @property
    def steps(self) -> int:
        """How many steps were recorded; events of other kinds do not count."""
        return self._steps

    def __len__(self) -> int:
        return sum(count for _, count in self._groups)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.events == other.events

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ledger(steps={self.steps}, groups={len(self._groups)})"

    def spent(self, delta: float, accountant: str = "pld") -> Spent:
        """Epsilon at `delta` of everything recorded so far; 0 for an empty ledger.

        The accountant composes the steps. Steps and events of other kinds are then added up by basic composition: each
        gets an equal part of `delta`, and their epsilons are summed. This is sound for any mixture, even if a later
        event was chosen by what an earlier one released.
        """
        delta = arguments.failure_probability(delta)
        chosen = accountant_named(accountant)
        steps = [(event, count) for event, count in self._groups if isinstance(event, StepEvent)]
        others = [(event, count) for event, count in self._groups if not isinstance(event, StepEvent)]
        part = delta / max(1, bool(steps) + sum(count for _, count in others))
        parts = [count * cast(PricedEvent, event).epsilon(part, chosen.name) for event, count in others]
        return Spent(chosen.epsilon(steps, part) + sum(parts), delta, self.steps, chosen.name)

    def to_dict(self) -> dict[str, object]:
        """Plain values, from which `from_dict` makes an equal ledger."""
        return {"events": [{"kind": e.kind, "event": e.to_dict(), "count": count} for e, count in self._groups]}

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> "Ledger":
        """The ledger that `to_dict` wrote; an entry without a kind is a step."""
        groups = record.get("events")
        if not isinstance(groups, list):
            raise InvalidArgument(f"a ledger has a list 'events', got the fields {sorted(record)}.")
        ledger = cls()
        for group in groups:
            if not isinstance(group, Mapping) or set(group) | {"kind"} != {"kind", "event", "count"}:
                raise InvalidArgument(f"an entry of a ledger has the fields 'kind', 'event', 'count', got {group!r}.")
            event = event_from(group.get("kind", StepEvent.kind), group["event"])
            ledger.record(event, group["count"])
        return ledger
