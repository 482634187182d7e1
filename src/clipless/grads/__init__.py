"""Exact per-record gradients of any module, in one forward and one backward pass."""

from clipless.grads.engine import ClippedSum, Engine, clipped_sum

__all__ = ["ClippedSum", "Engine", "clipped_sum"]
