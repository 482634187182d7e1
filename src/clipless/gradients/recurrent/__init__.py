"""Recurrent layers: their cells, their passes through time, and how their kernels are taken over."""

from clipless.gradients.recurrent.rule import recurrent, recurrent_cell

__all__ = ["recurrent", "recurrent_cell"]
