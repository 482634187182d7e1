"""Thresholds, and optionally noise, that shrink by a fixed schedule (Du et al.)."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from clipless import defaults
from clipless.arguments import positive
from clipless.errors import InvalidArgument
from clipless.noise_schedule import NoiseSchedule
from clipless.thresholds.policy import Fixed, Setting, State, shared_out, within_limits

NOISE_LEVELS = 32


@dataclass(frozen=True)
class Decay(Fixed):
    """C_t = start·rho^(t/T), and noise multipliers σ_t = σ_0·noise_rho^(t/T), t from 0.

    The noise schedule has at most `NOISE_LEVELS` levels, so that the ledger composes few different events; each level has
    the multiplier of its middle step. It depends only on t, so it costs no privacy.
    """

    start: float = defaults.THRESHOLD
    rho: float = defaults.DECAY_RHO
    noise_rho: float = defaults.NOISE_RHO

    def __post_init__(self) -> None:
        positive("start", self.start)
        for name, value in (("rho", self.rho), ("noise_rho", self.noise_rho)):
            if positive(name, value) > 1:
                raise InvalidArgument(f"{name} must lie in (0, 1], got {value!r}: 1 keeps the value constant.")

    def init(self, setting: Setting) -> State:
        return {"start": shared_out(self.start, setting.groups), "time": torch.zeros((), dtype=torch.float64)}

    def thresholds(self, state: State) -> Tensor:
        return within_limits(state["start"] * self.rho ** float(state["time"]))

    def update(self, state: State, released: Tensor | None, setting: Setting) -> State:
        return {"start": state["start"], "time": state["time"] + 1 / setting.steps}

    def noise_schedule(self, steps: int) -> NoiseSchedule:
        if self.noise_rho == 1:
            return [(1.0, steps)]
        levels = min(steps, NOISE_LEVELS)
        edges = [steps * level // levels for level in range(levels + 1)]
        return [(self.noise_rho ** ((first + last - 1) / 2 / steps), last - first) for first, last in pairwise(edges)]
