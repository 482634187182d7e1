"""A threshold that follows a quantile of the gradient norms (Andrew et al.)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clipless import defaults
from clipless.arguments import fraction, positive
from clipless.thresholds.policy import Fixed, Setting, State, shared_out, within_limits


@dataclass(frozen=True)
class Quantile(Fixed):
    """C ← C·exp(−rate·(b̃ − percentile)), b̃ a noised estimate of the fraction of norms that are at most C.

    Each record adds ±½ for every group to the counts, so their sensitivity is √G/2; `count_stddev` is the noise on a
    count. Counts are divided by the expected batch, never by the realised one. The default is B/20, or more if
    the batch is small: the statistic's multiplier is at least twice the step's.
    """

    percentile: float = defaults.PERCENTILE
    rate: float = defaults.QUANTILE_RATE
    start: float = defaults.THRESHOLD
    count_stddev: float | None = None

    def __post_init__(self) -> None:
        fraction("percentile", self.percentile)
        positive("rate", self.rate)
        positive("start", self.start)
        if self.count_stddev is not None:
            positive("count_stddev", self.count_stddev)

    def init(self, setting: Setting) -> State:
        return {"thresholds": shared_out(self.start, setting.groups)}

    def thresholds(self, state: State) -> Tensor:
        return state["thresholds"]

    def statistic_multiplier(self, total: float, setting: Setting) -> float | None:
        sensitivity = setting.groups**0.5 / 2
        if self.count_stddev is not None:
            return self.count_stddev / sensitivity
        return max(setting.expected_batch / 20 / sensitivity, 2 * total)

    def observe(self, state: State, norms: Tensor) -> Tensor | None:
        inside = (norms <= state["thresholds"].to(norms)).double() - 0.5
        return inside.sum(1, keepdim=True) * (2 / len(norms) ** 0.5)

    def update(self, state: State, released: Tensor | None, setting: Setting) -> State:
        assert released is not None
        counts = released * (setting.groups**0.5 / 2)
        below = 0.5 + counts / setting.expected_batch
        factor = torch.exp((-self.rate * (below - self.percentile)).clamp(-50, 50))
        return {"thresholds": within_limits(state["thresholds"] * factor.to(state["thresholds"]))}
