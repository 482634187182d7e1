"""From measured times, in milliseconds, to the numbers shown."""

import math
import statistics
from collections.abc import Sequence


def ratio_of_minima(times: Sequence[float], plain: Sequence[float]) -> float:
    """The shortest private step over the shortest plain one: the cost when nothing disturbs the machine.

    >>> ratio_of_minima([3.0, 9.0], [2.0, 5.0])
    1.5
    """
    return min(times) / min(plain)


def median_of_ratios(times: Sequence[float], plain: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round: disturbances of a whole round cancel out.

    >>> median_of_ratios([3.0, 30.0, 9.0], [2.0, 10.0, 3.0])
    3.0
    """
    return statistics.median(time / base for time, base in zip(times, plain, strict=True))


def spread(times: Sequence[float]) -> float:
    """Median over minimum: 1 on a quiet machine.

    >>> spread([2.0, 3.0, 4.0])
    1.5
    """
    return statistics.median(times) / min(times)


def geometric_mean(ratios: Sequence[float]) -> float:
    """
    >>> round(geometric_mean([0.5, 2.0, 8.0]), 9)
    2.0
    """
    return statistics.geometric_mean(ratios)


def slope(sizes: Sequence[float], times: Sequence[float]) -> float:
    """The exponent p of the power law `time = c * size**p` that fits best: least squares on logarithms.

    >>> round(slope([1, 2, 4], [5.0, 20.0, 80.0]), 9)
    2.0
    """
    fit = statistics.linear_regression([math.log(size) for size in sizes], [math.log(time) for time in times])
    return fit.slope
