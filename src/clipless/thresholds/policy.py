"""The protocol of all threshold policies, and what a policy knows about its run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from clipless.noise_schedule import NoiseSchedule

State = Mapping[str, Tensor]

LEAST, MOST = 1e-10, 1e10


@dataclass(frozen=True)
class Setting:
    """What is public about a run, and all that a policy knows of it.

    `noise_dimensions` [G]: a threshold C of group g adds `gradient_multiplier² · noise_dimensions[g] · C²` to the energy of
    the noise on the sum.
    """

    groups: int
    expected_batch: int = 1
    steps: int = 1
    gradient_multiplier: float = 1.0
    noise_dimensions: tuple[int, ...] = ()


class ThresholdPolicy(Protocol):
    """Sets the thresholds of the G groups, from one logical batch to the next.

    The configuration is frozen; the state is passed in and returned. `observe` sees true norms and returns a statistic,
    which is summed over the records of the batch; one record changes its L2 norm by at most 1. `update` sees that
    statistic with noise.
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

    def noise_schedule(self, steps: int) -> NoiseSchedule:
        """The noise multipliers of a run's steps, relative to the planned one, each with its number of steps."""


class Fixed:
    """Defaults for a policy without a statistic and without a noise schedule."""

    def statistic_multiplier(self, total: float, setting: Setting) -> float | None:
        return None

    def observe(self, state: State, norms: Tensor) -> Tensor | None:
        return None

    def update(self, state: State, released: Tensor | None, setting: Setting) -> State:
        return state

    def noise_schedule(self, steps: int) -> NoiseSchedule:
        return [(1.0, steps)]


def shared_out(start: float, groups: int) -> Tensor:
    """One threshold for the whole gradient divided over the groups, [G,1], so that the sensitivity is `start`."""
    return torch.full((groups, 1), start / groups**0.5)


def within_limits(thresholds: Tensor) -> Tensor:
    """Thresholds clamped to where their squares neither overflow nor underflow."""
    return thresholds.clamp(LEAST, MOST)
