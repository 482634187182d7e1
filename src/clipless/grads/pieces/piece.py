"""What every piece can do, and what the ways to bring it into form cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from clipless.grads.pieces.rows import squared_lengths, widest
from clipless.grads.pieces.scratch import empty

FEW = 2**14


@dataclass(frozen=True)
class Cost:
    """What a way costs for all records together: operations, bytes moved through memory, calls of torch, and the bytes
    held until the factors are known."""

    flops: float
    moved: float
    calls: int
    held: float


class Piece(Protocol):
    """A parameter's per-record gradients g_b, not necessarily written out.

    Where there are several exact ways to the norms and the sum, `ways` names them with their costs and `form` takes one;
    what `form` returns offers no further choice. A piece without a choice has no ways.
    """

    def __len__(self) -> int:
        """The number of records."""

    @property
    def sq_norms(self) -> Tensor:
        """‖g_b‖² for every record, [b], in float64 where the device has it. Too large rather than too small."""

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        """total = beta·total + Σ_b factors[b]·g_b, in place; with beta = 0 whatever was there is forgotten."""

    def per_record(self) -> Tensor:
        """All g_b written out, [b, *shape]."""

    def keep(self, mask: Tensor) -> "Piece":
        """The same piece with the records outside the mask replaced by exact zeros, be they NaN or infinite."""

    def rows(self, some: slice) -> "Piece":
        """The piece of some of the records."""

    def ways(self) -> Mapping[str, Cost]:
        """The exact ways to this piece."""

    def form(self, way: str) -> "Piece":
        """The piece by that way."""

    @property
    def signature(self) -> tuple[object, ...]:
        """What decides how long each way takes for one record: sizes and the like, without the number of records."""


class NoChoice:
    """A piece that is what it is."""

    signature: tuple[object, ...] = ()

    def ways(self) -> Mapping[str, Cost]:
        return {}

    def form(self, way: str) -> Piece:
        raise KeyError(way)


def formed(piece: Piece, way: str) -> Piece:
    """The piece by that way, or as it is if there was none to choose."""
    return piece.form(way) if way else piece


def weighted_sum(piece: Piece, factors: Tensor, like: Tensor) -> Tensor:
    """Σ_b factors[b]·g_b as a new tensor, shaped like the parameter."""
    total = torch.empty(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    piece.add_to(total, factors, beta=0)
    return total


def sq_norm(rows: Tensor) -> Tensor:
    """Squared length of each row of a buffer, [b]. Few numbers are added up in float64 by torch, with less ado."""
    flat = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    if flat.numel() <= FEW:
        return torch.linalg.vector_norm(flat, dim=1, dtype=widest(flat.device)).square()
    return squared_lengths([flat])[0]


def kept(rows: Tensor, mask: Tensor) -> Tensor:
    """The rows with those outside the mask set to zero, also where they are not finite."""
    return torch.where(mask.view(-1, *[1] * (rows.dim() - 1)), rows, 0)


def scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Every row times its factor."""
    factors = factors.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))
    return torch.mul(rows, factors, out=empty(rows.shape, rows)) if rows.is_contiguous() else rows * factors
