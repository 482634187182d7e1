"""Clipped sums of per-sample gradients: capturing output gradients, layer rules, and weighted sums."""

from clipless.gradients import recurrent
from clipless.gradients.checks.weights import weights_shaken
from clipless.gradients.clipped_sum import clipped_sum
from clipless.gradients.engine import Engine
from clipless.gradients.kernels import Kernels
from clipless.gradients.projections import ProjectionEngine

__all__ = ["Engine", "Kernels", "ProjectionEngine", "clipped_sum", "recurrent", "weights_shaken"]
