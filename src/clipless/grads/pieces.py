"""Pieces: one parameter's share of the gradient, record by record, in whichever form is cheap to hold.

Index legend: b record, t position, i in, o out, v row of a table.
"""

from functools import cached_property, reduce
from typing import Protocol

import torch
from torch import Tensor

CANCELLATION = 1024.0
ROUNDING = 8.0


class Piece(Protocol):
    """A parameter's per-record gradients g_b, not necessarily written out."""

    @property
    def sq_norms(self) -> Tensor:
        """‖g_b‖² for every record, [b]."""

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Σ_b factors[b]·g_b, of the parameter's shape."""

    def per_record(self) -> Tensor:
        """All g_b written out, [b, *shape]."""

    def keep(self, mask: Tensor) -> "Piece":
        """The same piece with the records outside the mask replaced by exact zeros, be they NaN or infinite."""


def sq_norm(rows: Tensor) -> Tensor:
    """Squared length of each row of a buffer, [b]; `vector_norm` is much faster than a sum of squares."""
    return torch.linalg.vector_norm(rows.reshape(len(rows), -1), dim=1).square()


def kept(rows: Tensor, mask: Tensor) -> Tensor:
    """The rows with those outside the mask set to zero, also where they are not finite."""
    return torch.where(mask.view(-1, *[1] * (rows.dim() - 1)), rows, 0)


def scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Every row times its factor."""
    return rows * factors.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))


class Instantiated:
    """Per-record gradients written out: norm and weighted sum read the same buffer."""

    def __init__(self, grads: Tensor) -> None:
        self.grads = grads

    @cached_property
    def sq_norms(self) -> Tensor:
        return sq_norm(self.grads)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        flat = self.grads.reshape(len(self.grads), -1)
        return (factors.to(flat.dtype) @ flat).view(self.grads.shape[1:])

    def per_record(self) -> Tensor:
        return self.grads

    def keep(self, mask: Tensor) -> "Instantiated":
        return Instantiated(kept(self.grads, mask))


class OuterProducts:
    """g_b = Σ_t grads[b,t]ᵀ acts[b,t], as for the weight of a linear layer, never written out where T is short.

    A `twin` has the very same grads: what is computed of them alone is computed once.
    """

    def __init__(self, acts: Tensor, grads: Tensor, twin: "OuterProducts | None" = None) -> None:
        self.acts, self.grads, self._twin = acts, grads, twin  # [b,t,i] [b,t,o]

    @cached_property
    def sq_norms(self) -> Tensor:
        _, t, i = self.acts.shape
        if t == 1:
            return sq_norm(self.acts) * sq_norm(self.grads)
        if 2 * t * t > i * self.grads.shape[2]:
            return sq_norm(self._written_out)
        return self._ghost()

    def weighted_sum(self, factors: Tensor) -> Tensor:
        if "_written_out" in self.__dict__:
            return Instantiated(self._written_out).weighted_sum(factors)
        acts, grads = self.acts, self.grads
        if acts.shape[2] < grads.shape[2]:
            acts = scaled(acts, factors)
        else:
            grads = scaled(grads, factors)
        if grads.stride(0) < grads.stride(1):  # positions first in memory: no copy if they are taken in that order
            acts, grads = acts.transpose(0, 1), grads.transpose(0, 1)
        return grads.flatten(0, 1).mT @ acts.flatten(0, 1)

    def per_record(self) -> Tensor:
        return self._written_out

    def keep(self, mask: Tensor) -> "OuterProducts":
        return OuterProducts(kept(self.acts, mask), kept(self.grads, mask))

    @cached_property
    def _written_out(self) -> Tensor:
        return self.grads.mT @ self.acts  # [b,o,i]

    @cached_property
    def _gram_of_grads(self) -> Tensor:
        return self.grads @ self.grads.mT if self._twin is None else self._twin._gram_of_grads

    def _ghost(self) -> Tensor:
        """Norms from two Gram matrices, T×T. Where the positions of a record nearly cancel, rounding could make the
        norm too small and so the record's share too large: those norms are computed from the gradient itself, and every
        norm is raised by the rounding error that the weighted sum can have."""
        gram_a, gram_g = self.acts @ self.acts.mT, self._gram_of_grads
        sq_norms = torch.linalg.vecdot(gram_a.flatten(1), gram_g.flatten(1))
        lengths = (gram_a.diagonal(dim1=1, dim2=2) * gram_g.diagonal(dim1=1, dim2=2)).clamp(min=0).sqrt().sum(1)
        unsure = ~(sq_norms * CANCELLATION >= lengths.square())
        if unsure.any():
            exact = self.grads[unsure].double().mT @ self.acts[unsure].double()
            sq_norms[unsure] = sq_norm(exact).to(sq_norms.dtype)
        return (sq_norms.sqrt() + ROUNDING * torch.finfo(lengths.dtype).eps * lengths).square()


class Scattered:
    """g_b adds grads[b,t] to row indices[b,t] of a table [v,d], as for an embedding; the table is never repeated."""

    def __init__(self, indices: Tensor, grads: Tensor, rows: int) -> None:
        self.indices, self.grads, self.rows = indices, grads, rows  # [b,t] [b,t,d]

    @cached_property
    def sq_norms(self) -> Tensor:
        b, _, d = self.grads.shape
        records = torch.arange(b, device=self.indices.device).unsqueeze(1)
        slots, slot_of = torch.unique(self.indices + records * self.rows, return_inverse=True)
        sums = self.grads.new_zeros(len(slots), d).index_add_(0, slot_of.flatten(), self.grads.flatten(0, 1))
        return self.grads.new_zeros(b).index_add_(0, slots // self.rows, sq_norm(sums))

    def weighted_sum(self, factors: Tensor) -> Tensor:
        rows = scaled(self.grads, factors).flatten(0, 1)
        return rows.new_zeros(self.rows, rows.shape[1]).index_add_(0, self.indices.flatten(), rows)

    def per_record(self) -> Tensor:
        b, _, d = self.grads.shape
        index = self.indices.unsqueeze(2).expand_as(self.grads)
        return self.grads.new_zeros(b, self.rows, d).scatter_add_(1, index, self.grads)

    def keep(self, mask: Tensor) -> "Scattered":
        return Scattered(self.indices, kept(self.grads, mask), self.rows)


class Tied:
    """One table [v,d] used both by rows, as an embedding, and as a matrix, as an output head: g_b is the sum of both.

    The cross term needs no table per record: Σ_ts δ_s[i_t]·(a_s·g_t), δ the gradient of the head's output.
    """

    def __init__(self, rows: Scattered, matrix: OuterProducts) -> None:
        self.rows, self.matrix = rows, matrix

    @cached_property
    def sq_norms(self) -> Tensor:
        rows, matrix = self.rows, self.matrix
        index = rows.indices.unsqueeze(1).expand(-1, matrix.grads.shape[1], -1)  # [b,s,t]
        cross = matrix.grads.gather(2, index) * (matrix.acts @ rows.grads.mT)
        apart = rows.sq_norms + matrix.sq_norms
        total = apart + 2 * cross.sum((1, 2))
        unsure = ~(total * CANCELLATION >= apart)
        for record in unsure.nonzero().flatten().tolist():
            total[record] = sq_norm(self._one(record))[0]
        return total

    def weighted_sum(self, factors: Tensor) -> Tensor:
        return self.rows.weighted_sum(factors) + self.matrix.weighted_sum(factors)

    def per_record(self) -> Tensor:
        return self.rows.per_record() + self.matrix.per_record()

    def keep(self, mask: Tensor) -> "Tied":
        return Tied(self.rows.keep(mask), self.matrix.keep(mask))

    def _one(self, record: int) -> Tensor:
        only = slice(record, record + 1)
        rows = Scattered(self.rows.indices[only], self.rows.grads[only], self.rows.rows)
        return rows.per_record() + OuterProducts(self.matrix.acts[only], self.matrix.grads[only]).per_record()


def combine(uses: list[Piece]) -> Piece:
    """One piece for a parameter that was used several times: its gradient is the sum over the uses.

    Uses of one kind are one longer sequence of positions; both kinds of use of a table are `Tied`; anything else is
    written out.
    """
    if len(uses) == 1:
        return uses[0]
    matrices = [use for use in uses if isinstance(use, OuterProducts)]
    tables = [use for use in uses if isinstance(use, Scattered)]
    if len(matrices) + len(tables) < len(uses):
        return Instantiated(reduce(torch.add, (use.per_record() for use in uses)))
    joined: list[Piece] = []
    if tables:
        indices, grads = (torch.cat([getattr(t, name) for t in tables], 1) for name in ("indices", "grads"))
        joined.append(Scattered(indices, grads, tables[0].rows))
    if matrices:
        acts, grads = (torch.cat([getattr(m, name) for m in matrices], 1) for name in ("acts", "grads"))
        joined.append(OuterProducts(acts, grads))
    return Tied(*joined) if len(joined) == 2 else joined[0]  # type: ignore[arg-type]
