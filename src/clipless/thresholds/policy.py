"""The protocol of all threshold policies."""

import math
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from clipless.errors import InvalidArgument, InvalidType

State = Mapping[str, Tensor]


class ThresholdPolicy(Protocol):
    """Sets the thresholds of the G groups, from one logical batch to the next."""

    def init(self, groups: int) -> State:
        """The state before the first step."""

    def thresholds(self, state: State) -> Tensor:
        """The current thresholds, [G,1]; fixed for a whole logical batch."""


def positive(name: str, value: object) -> float:
    """The value as a float if it is a positive finite number.

    >>> positive("gamma", 0.01)
    0.01
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidType(f"{name} must be a number, got {value!r}.")
    if not (math.isfinite(value) and value > 0):
        raise InvalidArgument(f"{name} must be positive and finite, got {value!r}.")
    return float(value)
