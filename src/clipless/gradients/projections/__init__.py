"""Clipped sums by random projections: norms estimated in forward mode, then one backward pass. No layer rules."""

from clipless.gradients.projections.engine import ProjectionEngine

__all__ = ["ProjectionEngine"]
