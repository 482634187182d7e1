"""Norms of sums whose parts may cancel."""

from collections.abc import Callable

import torch
from torch import Tensor

# A squared norm is trusted if it is at least 1/CANCELLATION of what it would be without cancellation.
CANCELLATION = 1024.0
# The rounding error of a sum, relative to the machine epsilon and the lengths of its parts.
ROUNDING = 8.0


def never_too_small(
    squares: Tensor,
    lengths: Tensor,
    dtype: torch.dtype,
    exact: Callable[[Tensor], Tensor],
    doubted: Tensor | None = None,
) -> Tensor:
    """Squared norms [b] that are not below those of sums computed in `dtype`. The parts' lengths add up to `lengths` [b].

    Where parts nearly cancel, rounding could make a norm too small and so the record's contribution too large. Those norms,
    and the `doubted` ones [b], are computed by `exact(which)`, and every norm is raised by the rounding error that the
    weighted sum can have.
    """
    unsure = ~(squares * CANCELLATION >= lengths.square())
    if doubted is not None:
        unsure |= doubted
    if unsure.any():
        squares[unsure] = exact(unsure).to(squares.dtype)
    return (squares.sqrt() + ROUNDING * torch.finfo(dtype).eps * lengths).square()
