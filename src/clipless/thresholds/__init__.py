"""Threshold policies: the threshold of each group, fixed for a whole logical batch.

A policy's configuration is frozen. Its state, a mapping of tensors, is passed in and returned, so it can be saved. A policy
learns from released, noised values only.
"""

from clipless.thresholds.constant import Constant
from clipless.thresholds.dc_e import DCE
from clipless.thresholds.dc_p import DCP
from clipless.thresholds.decay import Decay
from clipless.thresholds.policy import Setting, State, ThresholdPolicy
from clipless.thresholds.quantile import Quantile

__all__ = ["DCE", "DCP", "Constant", "Decay", "Quantile", "Setting", "State", "ThresholdPolicy"]
