"""Norms of sums whose parts may cancel."""

from collections.abc import Callable

import torch
from torch import Tensor

# A squared norm is trusted down to this part of the square that it would have if no parts cancelled.
CANCELLATION = 1024.0
# The rounding error of a sum, in units of its parts' lengths and the last place.
ROUNDING = 8.0


def never_too_small(
    squares: Tensor,
    lengths: Tensor,
    dtype: torch.dtype,
    exact: Callable[[Tensor], Tensor],
    doubted: Tensor | None = None,
) -> Tensor:
    """Squared norms [b] that are not below those of sums made in `dtype`, of parts whose lengths add up to `lengths` [b].

    Where parts nearly cancel, rounding could make a norm too small and so the record's share too large: those, and what
    is `doubted` [b], come from `exact(which)`, and every norm is raised by the rounding error that the weighted sum can
    have.
    """
    unsure = ~(squares * CANCELLATION >= lengths.square())
    if doubted is not None:
        unsure |= doubted
    if unsure.any():
        squares[unsure] = exact(unsure).to(squares.dtype)
    return (squares.sqrt() + ROUNDING * torch.finfo(dtype).eps * lengths).square()
