"""Sums of outer products, as for the weight of a linear layer.

Index legend: b record, t position, i in, o out.
"""

from collections.abc import Mapping
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from clipless.grads.pieces.instantiated import Instantiated
from clipless.grads.pieces.piece import Cost, Piece, kept, scaled, sq_norm
from clipless.grads.pieces.scratch import empty

CANCELLATION = 1024.0
ROUNDING = 8.0


@lru_cache(maxsize=4096)
def product_ways(b: int, t: int, i: int, o: int, size: int) -> Mapping[str, Cost]:
    """The ways to sums of outer products, for numbers of `size` bytes. With one position there is nothing to choose."""
    sums = 2.0 * b * t * i * o
    if t == 1:
        return {"ghost": Cost(sums, float(size * b * (i + o)), calls=6, held=size * b * o)}
    grams = 2.0 * b * t * t * (i + o)
    moved = size * b * (4 * t * t + 2 * t * min(i, o))
    return {
        "ghost": Cost(grams + sums, moved, calls=16 + 2 * b, held=size * b * t * o),
        "written": Cost(sums, 3.0 * size * b * i * o, calls=4 + b, held=size * b * i * o),
    }


class OuterProducts:
    """g_b = Σ_t grads[b,t]ᵀ acts[b,t]: norms from Gram matrices, or everything written out.

    A `twin` has the very same grads: what is computed of them alone is computed once. So has `summed`, over positions.
    """

    def __init__(
        self, acts: Tensor, grads: Tensor, twin: "OuterProducts | None" = None, summed: Instantiated | None = None
    ) -> None:
        self.acts, self.grads, self._twin, self._summed = acts, grads, twin, summed  # [b,t,i] [b,t,o]

    def __len__(self) -> int:
        return self.acts.shape[0]

    @cached_property
    def sq_norms(self) -> Tensor:
        if self.acts.shape[1] == 1:
            return sq_norm(self.acts) * (sq_norm(self.grads) if self._summed is None else self._summed.sq_norms)
        return self._ghost()

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        acts, grads = self.acts, self.grads
        if acts.shape[2] < grads.shape[2]:
            acts = scaled(acts, factors)
        else:
            grads = scaled(grads, factors)
        if grads.stride(0) < grads.stride(1):  # positions first in memory: no copy if they are taken in that order
            acts, grads = acts.transpose(0, 1), grads.transpose(0, 1)
        torch.addmm(total, grads.flatten(0, 1).mT, acts.flatten(0, 1), beta=beta, out=total)

    def per_record(self) -> Tensor:
        b, _, o = self.grads.shape
        return torch.bmm(self.grads.mT, self.acts, out=empty((b, o, self.acts.shape[2]), self.acts))  # [b,o,i]

    def keep(self, mask: Tensor) -> "OuterProducts":
        return OuterProducts(kept(self.acts, mask), kept(self.grads, mask))

    def rows(self, some: slice) -> "OuterProducts":
        return OuterProducts(self.acts[some], self.grads[some])

    @property
    def signature(self) -> tuple[object, ...]:
        return (*self.acts.shape[1:], self.grads.shape[2])

    def ways(self) -> Mapping[str, Cost]:
        b, t, i = self.acts.shape
        return product_ways(b, t, i, self.grads.shape[2], self.acts.element_size())

    def form(self, way: str) -> Piece:
        return self if way == "ghost" else Instantiated(self.per_record())

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
