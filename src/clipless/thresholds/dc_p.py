"""DC-SGD-P: the threshold is a percentile of the gradient norms, read off a private histogram."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clipless import defaults
from clipless.arguments import fraction
from clipless.thresholds.histogram import Histogram
from clipless.thresholds.policy import LEAST, MOST, Setting, State, shared_out


@dataclass(frozen=True)
class DCP(Histogram):
    """The middle of the bin in which the running sum reaches `percentile` of all; the range is then twice that.

    A histogram whose noised sum is not positive changes nothing.
    """

    percentile: float = defaults.PERCENTILE

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("percentile", self.percentile)

    def init(self, setting: Setting) -> State:
        start = shared_out(self.start, setting.groups)
        return {"thresholds": start, "range": start.double()}

    def update(self, state: State, released: Tensor | None, setting: Setting) -> State:
        counts = self.counts(released, setting)
        total = counts.sum(1, keepdim=True)
        reached = counts.cumsum(1) >= self.percentile * total
        first = reached.int().argmax(1, keepdim=True)
        middle = self.middles(state).gather(1, first).clamp(LEAST, MOST)
        signal = total > 0
        return {
            "thresholds": torch.where(signal, middle.to(state["thresholds"].dtype), state["thresholds"]),
            "range": torch.where(signal, 2 * middle, state["range"]),
        }
