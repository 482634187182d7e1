"""Rows added to a table, as for an embedding.

Index legend: b record, t position, v row of the table, d feature.
"""

from functools import cached_property

import torch
from torch import Tensor

from clipless.grads.pieces.piece import NoChoice, kept, scaled, sq_norm


class Scattered(NoChoice):
    """g_b adds grads[b,t] to row indices[b,t] of a table [v,d]; the table is never repeated."""

    def __init__(self, indices: Tensor, grads: Tensor, size: int) -> None:
        self.indices, self.grads, self.size = indices, grads, size  # [b,t] [b,t,d] v

    def __len__(self) -> int:
        return len(self.grads)

    @cached_property
    def sq_norms(self) -> Tensor:
        b, _, d = self.grads.shape
        records = torch.arange(b, device=self.indices.device).unsqueeze(1)
        slots, slot_of = torch.unique(self.indices + records * self.size, return_inverse=True)
        sums = self.grads.new_zeros(len(slots), d).index_add_(0, slot_of.flatten(), self.grads.flatten(0, 1))
        return self.grads.new_zeros(b).index_add_(0, slots // self.size, sq_norm(sums))

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        if beta == 0:
            total.zero_()
        total.index_add_(0, self.indices.flatten(), scaled(self.grads, factors).flatten(0, 1))

    def per_record(self) -> Tensor:
        b, _, d = self.grads.shape
        return self.add_to_each(self.grads.new_zeros(b, self.size, d))

    def add_to_each(self, tables: Tensor) -> Tensor:
        """Add every g_b to its own of the tables [b,v,d]."""
        return tables.scatter_add_(1, self.indices.unsqueeze(2).expand_as(self.grads), self.grads)

    def keep(self, mask: Tensor) -> "Scattered":
        return Scattered(self.indices, kept(self.grads, mask), self.size)

    def rows(self, some: slice) -> "Scattered":
        return Scattered(self.indices[some], self.grads[some], self.size)
