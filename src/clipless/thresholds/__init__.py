"""Threshold policies: what each group's gradient is compared with, fixed for a whole logical batch.

A policy's configuration is frozen; what changes is its state, a mapping of tensors that is passed in and returned, so
it can be saved. A policy learns from released, noised values only.
"""

from clipless.thresholds.constant import Constant
from clipless.thresholds.policy import State, ThresholdPolicy, positive

__all__ = ["Constant", "State", "ThresholdPolicy", "positive"]
