"""The protocol of all threshold policies, and what a policy is told of the run it serves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from clipless.errors import InvalidArgument, InvalidType

State = Mapping[str, Tensor]
Stairs = Sequence[tuple[float, int]]

LEAST, MOST = 1e-10, 1e10


@dataclass(frozen=True)
class Setting:
    """What is public about a run: the policies' formulas need no more.

    `noise_dimensions` [G]: adding to group g's threshold C costs `gradient_multiplier² · noise_dimensions[g] · C²` of
    noise energy on the sum.
    """

    groups: int
    expected_batch: int = 1
    steps: int = 1
    gradient_multiplier: float = 1.0
    noise_dimensions: tuple[int, ...] = ()


class ThresholdPolicy(Protocol):
    """Sets the thresholds of the G groups, from one logical batch to the next.

    The configuration is frozen; what changes is the state, which goes in and comes out. `observe` sees true norms and
    gives a statistic that is summed over the records of the batch, of which one record moves the length by at most 1;
    `update` sees that statistic with noise.
    """

    def init(self, setting: Setting) -> State:
        """The state before the first step."""

    def thresholds(self, state: State) -> Tensor:
        """The current thresholds, [G,1]; fixed for a whole logical batch."""

    def statistic_multiplier(self, total: float, setting: Setting) -> float | None:
        """The noise multiplier of the statistic when a whole step has the multiplier `total`; None without one."""

    def observe(self, state: State, norms: Tensor) -> Tensor | None:
        """The statistic of some records' norms [G,B]; None if the policy needs none."""

    def update(self, state: State, released: Tensor | None, setting: Setting) -> State:
        """The state after a step, from the noised statistic."""

    def noise_schedule(self, steps: int) -> Stairs:
        """The noise multipliers of a run's steps, relative to the planned one, as stairs (relative, number of steps)."""


class Fixed:
    """What a policy without a statistic and without a noise schedule answers."""

    def statistic_multiplier(self, total: float, setting: Setting) -> float | None:
        return None

    def observe(self, state: State, norms: Tensor) -> Tensor | None:
        return None

    def update(self, state: State, released: Tensor | None, setting: Setting) -> State:
        return state

    def noise_schedule(self, steps: int) -> Stairs:
        return [(1.0, steps)]


def positive(name: str, value: object) -> float:
    """The value as a float if it is a positive finite number.

    >>> positive("gamma", 0.01)
    0.01
    """
    number = real(name, value)
    if not (math.isfinite(number) and number > 0):
        raise InvalidArgument(f"{name} must be positive and finite, got {value!r}.")
    return number


def share(name: str, value: object) -> float:
    """The value as a float if it lies strictly between 0 and 1."""
    number = real(name, value)
    if not 0 < number < 1:
        raise InvalidArgument(f"{name} must lie between 0 and 1, got {value!r}.")
    return number


def real(name: str, value: object) -> float:
    """The value as a float if it is a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidType(f"{name} must be a number, got {value!r}.")
    return float(value)


def shared_out(start: float, groups: int) -> Tensor:
    """One threshold for the whole gradient divided over the groups, [G,1], so that the sensitivity is `start`."""
    return torch.full((groups, 1), start / groups**0.5)


def within_limits(thresholds: Tensor) -> Tensor:
    """Thresholds kept where their squares neither overflow nor vanish."""
    return thresholds.clamp(LEAST, MOST)
