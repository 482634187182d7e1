"""Sums of outer products, as for the weight of a linear layer.

Index legend: b record, t position, i in, o out.
"""

from collections.abc import Mapping
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from clipless.grads.pieces.cancellation import never_too_small
from clipless.grads.pieces.instantiated import Instantiated
from clipless.grads.pieces.piece import Cost, Piece, kept, scaled, sq_norm
from clipless.grads.pieces.rows import widest
from clipless.grads.pieces.scratch import empty

# Gradients computed once more in float64 are written out for so many numbers at a time.
AT_ONCE = 2**22


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
        squares, lengths, lost = self.ghost
        return never_too_small(squares, lengths, self.acts.dtype, self._exact, lost)

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

    @cached_property
    def ghost(self) -> tuple[Tensor, Tensor, Tensor]:
        """Squared norms from two Gram matrices, T×T, the lengths of all positions together, and where digits may be lost to
        underflow, all [b]."""
        wide, tiny = widest(self.acts.device), torch.finfo(self.acts.dtype).tiny
        gram_a, gram_g = self.acts @ self.acts.mT, self._gram_of_grads
        squares = torch.linalg.vecdot(gram_a.flatten(1), gram_g.flatten(1)).to(wide)
        own_a, own_g = (gram.diagonal(dim1=1, dim2=2).to(wide).clamp(min=0) for gram in (gram_a, gram_g))
        lengths = (own_a * own_g).sqrt().sum(1)
        _, t, i = self.acts.shape
        error = tiny * t * t * max(i, self.grads.shape[2]) * (own_a.amax(1) + own_g.amax(1))
        lost = squares < 1e4 * error
        if lost.any():
            lost &= (self.grads != 0).flatten(1).any(1)  # nothing was lost of nothing
        return squares, lengths, lost

    def _exact(self, which: Tensor) -> Tensor:
        """Squared norms of some records, from their gradients in float64."""
        some, wide = which.nonzero().flatten(), widest(self.acts.device)
        size = max(1, AT_ONCE // (self.acts.shape[2] * self.grads.shape[2]))
        return torch.cat([sq_norm(self.grads[few].to(wide).mT @ self.acts[few].to(wide)) for few in some.split(size)])
