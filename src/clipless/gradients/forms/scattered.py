"""Gradients that are rows added to a table, as for an embedding.

Index legend: b record, t position, v row of the table, d feature.
"""

from functools import cached_property

import torch
from torch import Tensor

from clipless.gradients.forms.cancellation import never_too_small
from clipless.gradients.forms.dense import kept, scaled, sq_norm
from clipless.gradients.forms.form import NoChoice
from clipless.native.by_torch import widest

# At most so many numbers of a record are summed in their own type.
RUN = 1024


class Scattered(NoChoice):
    """g_b adds grads[b,t] to row indices[b,t] of a table [v,d]; no table per record is written out.

    Many positions may meet in one row, so sums are made in float64.
    """

    def __init__(self, indices: Tensor, grads: Tensor, size: int) -> None:
        self.indices, self.grads, self.size = indices, grads, size  # [b,t] [b,t,d] v

    def __len__(self) -> int:
        return len(self.grads)

    @cached_property
    def sq_norms(self) -> Tensor:
        return never_too_small(self.summed(self.grads), self.lengths, self.grads.dtype, self._exact)

    @cached_property
    def lengths(self) -> Tensor:
        """The sum of the lengths of all rows that a record adds, [b]."""
        b, t, d = self.grads.shape
        return sq_norm(self.grads.reshape(b * t, d)).sqrt().view(b, t).sum(1)

    def summed(self, grads: Tensor) -> Tensor:
        """Squared norms of the records' sums of these rows."""
        slots, sums = self._by_record(grads if grads.shape[1] <= RUN else grads.to(widest(grads.device)))
        squares = sq_norm(sums)
        return squares.new_zeros(len(grads)).index_add_(0, slots // self.size, squares)

    def _by_record(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        """The places v + b·size, [n], and the sums that record b adds to row v of the table, [n,d]."""
        slots, slot_of = self._slots
        return slots, grads.new_zeros(len(slots), grads.shape[2]).index_add_(0, slot_of, grads.flatten(0, 1))

    @cached_property
    def _slots(self) -> tuple[Tensor, Tensor]:
        records = torch.arange(len(self.indices), device=self.indices.device).unsqueeze(1)
        slots, slot_of = torch.unique(self.indices + records * self.size, return_inverse=True)
        return slots, slot_of.flatten()

    def _exact(self, which: Tensor) -> Tensor:
        grads = self.grads[which].to(widest(self.grads.device))
        return Scattered(self.indices[which], grads, self.size).summed(grads)

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        if beta == 0:
            total.zero_()
        rows = scaled(self.grads.to(widest(self.grads.device)), factors)
        hit, place = torch.unique(self.indices, return_inverse=True)
        sums = rows.new_zeros(len(hit), rows.shape[2]).index_add_(0, place.flatten(), rows.flatten(0, 1))
        total.index_add_(0, hit, sums.to(total.dtype))

    def per_record(self) -> Tensor:
        b, _, d = self.grads.shape
        return self.add_to_each(self.grads.new_zeros(b, self.size, d))

    def add_to_each(self, tables: Tensor) -> Tensor:
        """Add g_b to tables[b], for tables [b,v,d]."""
        return tables.scatter_add_(1, self.indices.unsqueeze(2).expand_as(self.grads), self.grads)

    def keep(self, mask: Tensor) -> "Scattered":
        return Scattered(self.indices, kept(self.grads, mask), self.size)

    def rows(self, some: slice) -> "Scattered":
        return Scattered(self.indices[some], self.grads[some], self.size)
