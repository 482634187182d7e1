"""What `clipless bench` measures: time and memory of a private step against a plain one, and how both grow.

A *way* is one method of taking a training step: plain, clipless with some clipping, or Opacus in one of its modes.
"""
