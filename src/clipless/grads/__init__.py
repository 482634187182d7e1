"""Per-record gradients: what hooks see, which way each layer's share is computed, and the clipped sum of it all."""

from clipless.grads.clipped_sum import ClippedSum, clipped_sum
from clipless.grads.engine import Engine
from clipless.grads.tuner import Tuner, as_tuner

__all__ = ["ClippedSum", "Engine", "Tuner", "as_tuner", "clipped_sum"]
