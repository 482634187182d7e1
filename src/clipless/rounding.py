"""Privacy budgets as text, never rounded down."""

import math
from decimal import ROUND_CEILING, Decimal


def rounded_up(value: float) -> str:
    """Four significant digits, rounded up, so that no epsilon or delta is understated.

    >>> rounded_up(2.99312), rounded_up(0.000336), rounded_up(4.6165e-14), rounded_up(1160), rounded_up(math.inf)
    ('2.994', '0.000336', '4.617e-14', '1160', 'inf')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exact = Decimal(repr(float(value)))
    return f"{float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - 3), rounding=ROUND_CEILING)):.6g}"
