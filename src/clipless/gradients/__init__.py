"""Clipped sums of per-sample gradients: capturing output gradients, layer rules, and weighted sums."""

from clipless.gradients import recurrent
from clipless.gradients.clipped_sum import clipped_sum
from clipless.gradients.engine import Engine
from clipless.gradients.kernels import Kernels

__all__ = ["Engine", "Kernels", "clipped_sum", "recurrent"]
