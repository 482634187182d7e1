"""Conversion between the sequences that recurrent layers take and [t,b,d], positions first, records sorted by length.

Index legend: t position, b record, d feature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Sequences:
    """The layout of a layer's input and output: [b,t,d], [t,b,d], or packed as [t·b,d] with `batch_sizes` [t], the number of
    records at each position."""

    batch_first: bool
    batch_sizes: Tensor | None = None

    def timed(self, data: Tensor) -> Tensor:
        """The data as [t,b,d], with zeros beyond a record's end."""
        if self.batch_sizes is None:
            return data.transpose(0, 1) if self.batch_first else data
        there = self._there(data)
        return data.new_zeros(*there.shape, data.shape[1]).masked_scatter_(there.unsqueeze(2), data)

    def given(self, timed: Tensor) -> Tensor:
        """[t,b,d] in the layer's own layout."""
        if self.batch_sizes is None:
            return timed.transpose(0, 1) if self.batch_first else timed
        return timed[self._there(timed)]

    def sizes(self, timed: Tensor) -> list[int]:
        """The number of records at each position."""
        return [timed.shape[1]] * len(timed) if self.batch_sizes is None else self.batch_sizes.tolist()

    def _there(self, data: Tensor) -> Tensor:
        assert self.batch_sizes is not None
        counts = self.batch_sizes.to(data.device)
        return torch.arange(int(self.batch_sizes[0]), device=data.device) < counts.unsqueeze(1)  # [t,b]


def by_sequence(args: Sequence[Any], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of the outputs of a layer that was called with `args`, with a row for each sequence, in the order in
    which these were given to be packed: that of packed outputs as [b,t,d]."""
    source = args[0] if args else None
    if not isinstance(source, PackedSequence):
        return grads
    timed = Sequences(False, source.batch_sizes).timed(grads[0])  # [t,b,d]
    order = source.unsorted_indices
    rows = (timed if order is None else timed.index_select(1, order)).transpose(0, 1)
    return rows, *grads[1:]
