"""Numbers of a report with the mark that says what the guarantee does not cover."""

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

NOT_PRIVATE = "not private"
PUBLIC = "counts as public"

TEST_RECORDS = "computed from the test records, which the guarantee does not cover"
DURATION = "the time a step takes grows with the batch that was drawn, and no noise hides that"
UNPROTECTED = "trained without privacy"
SIZE = "the guarantee takes the number of training records as known"


@dataclass(frozen=True)
class MarkedText:
    """A text, and why the guarantee does not cover it; without a `mark` it does, or nothing in it comes from records."""

    text: str
    mark: str = ""
    why: str = ""


def not_private(text: str, why: str) -> MarkedText:
    return MarkedText(text, NOT_PRIVATE, why)


def percent_up(share: float) -> str:
    """A probability in percent, never rounded down; more digits near 100, so that no bound below 1 is shown as 100.

    >>> percent_up(0.952574), percent_up(0.99999), percent_up(1.0), percent_up(0.0100001)
    ('95.26 %', '99.999 %', '100 %', '1.01 %')
    """
    exact = Decimal(repr(float(share))) * 100
    digits = 2 if exact < 99 or exact >= 100 else min(12, 1 - (100 - exact).adjusted())
    shown = exact.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING)
    return f"{min(shown, Decimal(100)).normalize():f} %"


def metric(name: str, value: float) -> str:
    """A metric's value for a reader: accuracies in percent, anything else as a number."""
    return f"{value:.2%}".replace("%", " %") if name.endswith("accuracy") else f"{value:.4g}"


def finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
