"""A plan and the events next to it must agree. Hashes cannot tell: a file that was edited can be given new ones."""

import math
from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from typing import Any

from clipless.accounting.events import Event, StepEvent
from clipless.accounting.ledger import Ledger

ROUNDING = 1e-9
# Plans of other versions of the numerical libraries differ by less.
PRICING = 1e-3


def contradicted_field(plan: Mapping[str, Any], ledger: Ledger) -> str | None:
    """The field of the plan that these steps, planned or recorded, contradict; None if they agree with all of it."""
    steps = [event for event, _ in ledger.events if isinstance(event, StepEvent)]
    if not steps:
        return None
    multiplier = plan.get("noise_multiplier")
    if multiplier is not None and not _equal(multiplier, steps[0].noise_multiplier):
        return "noise_multiplier"
    rate = plan.get("sample_rate")
    if rate is not None and not all(_equal(rate, event.sample_rate) for event in steps):
        return "sample_rate"
    return "projections" if any(event.projections != plan.get("projections") for event in steps) else None


def contradicted_header(fields: Mapping[str, Any], planned: Ledger) -> str | None:
    """The field in which the first line of a ledger contradicts itself; None if there is none."""
    plan = fields["plan"]
    for name in ("delta", "accountant"):
        if name in plan and plan[name] != fields[name]:
            return name
    if planned.steps and plan.get("steps", planned.steps) != planned.steps:
        return "steps"
    return contradicted_field(plan, planned)


def unplanned_event(planned: Ledger, recorded: Iterable[Event]) -> int | None:
    """The number of the first event, counted from 1, that is not the planned one; beyond the plan its last one is
    expected. None if all are."""
    last = planned.events[-1][0]
    expected = chain.from_iterable(repeat(event, count) for event, count in planned.events)
    for number, event in enumerate(recorded, start=1):
        if event != next(expected, last):
            return number
    return None


def broken_promise(plan: Mapping[str, Any], ledger: Ledger) -> bool:
    """Whether these steps, of which there are no more than planned, cost more than the plan promises."""
    promised, steps = plan.get("epsilon"), plan.get("steps", 0)
    if not isinstance(promised, (int, float)) or ledger.steps > steps:
        return False
    return ledger.spent(plan["delta"], plan["accountant"]).epsilon > promised * (1 + PRICING)


def _equal(stated: object, found: float) -> bool:
    return isinstance(stated, (int, float)) and math.isclose(stated, found, rel_tol=ROUNDING)
