"""Recurrent layers: cells, forward and backward through time, and the takeover of torch's kernels."""

from clipless.gradients.recurrent.rule import recurrent, recurrent_cell

__all__ = ["recurrent", "recurrent_cell"]
