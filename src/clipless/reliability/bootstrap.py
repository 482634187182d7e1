"""Intervals for any score of predictions, by resampling the records."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from clipless.arguments import whole
from clipless.errors import InvalidArgument
from clipless.reliability.checks import as_array, checked

Metric = Callable[[Any, Any], float]


@dataclass(frozen=True)
class Interval:
    """A score, and where its value on the whole population lies with probability `level`, nearly."""

    value: float
    low: float
    high: float
    level: float = 0.95

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def bootstrap(
    metric: Metric,
    probabilities: Any,
    labels: Any,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    most: float = math.inf,
) -> Interval:
    """The basic bootstrap interval of `metric(probabilities, labels)`: 2·value − quantiles of resamples, within 0 … `most`.

    Reflecting at the value removes the bias of ECE, which resampling adds a second time. So the interval of a well
    calibrated model's ECE can lie below the value, which is then mostly bias. For MCE, a maximum, it is rough.
    """
    if not 0 < level < 1:
        raise InvalidArgument(f"level must lie between 0 and 1, got {level}.")
    checked(probabilities, labels)
    table, found = as_array(probabilities), as_array(labels)
    draws = np.random.default_rng(seed)
    value = metric(table, found)
    again = np.empty(whole("resamples", resamples))
    for number in range(len(again)):
        chosen = draws.integers(len(found), size=len(found))
        again[number] = metric(table[chosen], found[chosen])
    if not np.isfinite(again).all():
        return Interval(value, 0.0, math.inf, level)
    lower, upper = np.quantile(again, [(1 - level) / 2, (1 + level) / 2])
    low, high = (min(max(0.0, 2 * value - float(end)), most) for end in (upper, lower))
    return Interval(value, low, high, level)
