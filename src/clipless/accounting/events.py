"""What private training releases, as data.

What it costs holds for one record that becomes empty, or, at a rate that does not follow from the number of records, for one
that is added or removed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from clipless import arguments
from clipless.arguments import named
from clipless.errors import InvalidArgument, InvalidType


class Event(Protocol):
    """Something released that a ledger can hold: plain data under the name of its kind."""

    kind: ClassVar[str]

    def to_dict(self) -> dict[str, object]:
        """Plain values, from which `from_dict` makes an equal event."""

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> "Event":
        """The event that `to_dict` wrote, every field checked."""


class PricedEvent(Event, Protocol):
    """An event other than a step of DP-SGD, which computes its own price."""

    def epsilon(self, delta: float, accountant: str) -> float:
        """What this event alone costs at `delta`."""


EVENTS: dict[str, type[Event]] = {}
_E = TypeVar("_E", bound=Event)


def registered(event: type[_E]) -> type[_E]:
    """Class decorator: ledgers can hold events of this kind, and read them back."""
    if event.kind in EVENTS:
        raise InvalidArgument(f"events of kind {event.kind!r} are registered already: choose another kind.")
    EVENTS[event.kind] = event
    return event


def event_from(kind: object, record: object) -> Event:
    """The event of that kind that `to_dict` wrote."""
    if not isinstance(record, Mapping):
        raise InvalidArgument(f"the record of an event is a mapping of its fields, got {record!r}.")
    return named("kind of event", kind, EVENTS).from_dict(record)


def joint_multiplier(*multipliers: float) -> float:
    """The multiplier of one Gaussian that costs as much as several on the same batch: (Σ z^-2)^(-1/2).

    A single multiplier is returned unchanged. If one is 0 the result is 0; infinity (nothing released) costs nothing.

    >>> joint_multiplier(1.1)
    1.1
    >>> joint_multiplier(3.0, 4.0)
    2.4
    >>> joint_multiplier(2.0, float("inf"))
    2.0
    """
    if not multipliers:
        raise InvalidArgument("joint_multiplier needs at least one multiplier; pass math.inf if nothing is released.")
    ratios = [arguments.multiplier("multiplier", z) for z in multipliers]
    least = min(ratios)
    if len(ratios) == 1 or least in (0.0, math.inf):
        return least
    return least / math.sqrt(sum((least / z) ** 2 for z in ratios))


def gradient_multiplier(total: float, statistic: float) -> float:
    """The gradient's multiplier, given those of the whole step and of a statistic on the same batch.

    Guarantee: `joint_multiplier(gradient_multiplier(total, statistic), statistic)` is at least `total`, and exceeds it only
    by float rounding. The statistic must be noisier than the whole step.

    >>> gradient_multiplier(2.4, 4.0)
    3.0
    >>> gradient_multiplier(1.0, float("inf"))
    1.0
    """
    total = arguments.positive_multiplier("total multiplier", total)
    statistic = arguments.positive_multiplier("statistic multiplier", statistic)
    if statistic <= total:
        raise InvalidArgument(
            f"a statistic multiplier of {statistic} takes more than the whole step, whose multiplier is {total}: raise "
            f"it above {total}. {2 * total:g} leaves 3/4 of the budget to the gradient."
        )
    ratio = total / statistic
    gradient = total / math.sqrt((1 - ratio) * (1 + ratio))
    ulp = 2.0**-52
    while joint_multiplier(gradient, statistic) < total:
        gradient *= 1 + ulp
        ulp *= 2
    return gradient


@registered
@dataclass(frozen=True)
class StepEvent:
    """One step: a Poisson batch, its noised gradient sum, and the noised statistics of the same batch.

    Multipliers are ratios (standard deviation / L2 sensitivity). 0 means released in clear, infinity not released. With
    `projections` the gradient was clipped by norms that so many random projections estimate: its sensitivity is random
    then, and its multiplier is that at an estimate without error.

    >>> StepEvent(sample_rate=0.01, gradient_multiplier=3.0, statistic_multipliers=(4.0,)).noise_multiplier
    2.4
    """

    kind: ClassVar[str] = "step"

    sample_rate: float
    gradient_multiplier: float
    statistic_multipliers: tuple[float, ...] = ()
    projections: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.statistic_multipliers, tuple):
            raise InvalidType(
                f"statistic_multipliers must be a tuple, got {self.statistic_multipliers!r}; write (z,) for one."
            )
        statistics = tuple(arguments.multiplier("statistic multiplier", z) for z in self.statistic_multipliers)
        object.__setattr__(self, "sample_rate", arguments.rate(self.sample_rate))
        object.__setattr__(
            self, "gradient_multiplier", arguments.multiplier("noise_multiplier", self.gradient_multiplier)
        )
        object.__setattr__(self, "statistic_multipliers", statistics)
        if self.projections is not None:
            object.__setattr__(self, "projections", arguments.whole("projections", self.projections))

    @property
    def noise_multiplier(self) -> float:
        """The multiplier of everything this step releases, taken together."""
        return joint_multiplier(self.gradient_multiplier, *self.statistic_multipliers)

    def to_dict(self) -> dict[str, object]:
        """Plain values, from which `from_dict` makes an equal event. Projections are left out where there are none."""
        return {
            "sample_rate": self.sample_rate,
            "gradient_multiplier": self.gradient_multiplier,
            "statistic_multipliers": list(self.statistic_multipliers),
        } | ({} if self.projections is None else {"projections": self.projections})

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> "StepEvent":
        """The event that `to_dict` wrote; every field but projections is required, and all are checked."""
        fields = {"sample_rate", "gradient_multiplier", "statistic_multipliers"}
        if set(record) - {"projections"} != fields:
            raise InvalidArgument(f"a step event has the fields {sorted(fields)}, got {sorted(record)}.")
        statistics = record["statistic_multipliers"]
        if not isinstance(statistics, (list, tuple)):
            raise InvalidType(f"statistic_multipliers must be a list of numbers, got {statistics!r}.")
        return cls(
            arguments.real("sample_rate", record["sample_rate"]),
            arguments.real("gradient_multiplier", record["gradient_multiplier"]),
            tuple(statistics),
            arguments.whole("projections", record["projections"]) if "projections" in record else None,
        )
