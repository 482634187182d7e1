"""Rows of many tensors in one call: their squared lengths, and their sums by weights.

Most parameters are small, and several calls of torch for each take longer than all the arithmetic. The compiled code is
for float32 in main memory; torch does the same, tensor by tensor, for everything else and where nothing was compiled.
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from clipless.compiled import COUNT, LIBRARY, POINTER, function, threads


class Weighted(NamedTuple):
    """A sum to be made: total [n] = beta·total + Σ_b factors[b]·rows[b], in place; with beta = 0 whatever was there is
    forgotten."""

    total: Tensor  # [n]
    rows: Tensor  # [b,n]
    factors: Tensor  # [b]
    beta: int


def squared_lengths(rows: Sequence[Tensor]) -> Tensor:
    """Of tensors [b,n], with n as it may be, ‖row‖² for every row, [len(rows),b].

    >>> squared_lengths([torch.tensor([[3.0, 4.0]]), torch.ones(1, 5)])
    tensor([[25.],
            [ 5.]])
    """
    fast = compiled()
    if fast is None or not all(map(_suits, rows)):
        return lengths_by_torch(rows)
    return fast.squared_lengths(rows)


def add_rows(sums: Sequence[Weighted]) -> None:
    """Make all these sums.

    >>> total = torch.tensor([1.0, torch.nan])
    >>> add_rows([Weighted(total, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 1.0]), beta=0)])
    >>> total
    tensor([13., 24.])
    """
    fast = compiled()
    if fast is None or not all(_suits(total) and _suits(rows) for total, rows, _, _ in sums):
        sums_by_torch(sums)
    else:
        fast.add_rows([sum._replace(factors=sum.factors.to(torch.float32).contiguous()) for sum in sums])


def _suits(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def lengths_by_torch(rows: Sequence[Tensor]) -> Tensor:
    """`vector_norm` is much faster than a sum of squares."""
    return torch.stack([torch.linalg.vector_norm(tensor, dim=1).square() for tensor in rows])


def sums_by_torch(sums: Sequence[Weighted]) -> None:
    for total, rows, factors, beta in sums:
        torch.addmv(total, rows.mT, factors.to(rows.dtype), beta=beta, out=total)


class Compiled:
    """The compiled forms of both."""

    def __init__(self, library: Path) -> None:
        arguments = (POINTER, POINTER, COUNT, COUNT, POINTER, COUNT)
        self.lengths = function("clipless_squared_lengths", *arguments, library=library)
        self.sums = function("clipless_add_rows", *[POINTER] * 5, *[COUNT] * 3, library=library)

    def squared_lengths(self, rows: Sequence[Tensor]) -> Tensor:
        assert self.lengths is not None
        records = rows[0].shape[0]
        found = torch.empty(len(rows), records)
        widths = [tensor.shape[1] for tensor in rows]
        work = threads(4 * records * sum(widths))
        self.lengths(_places(rows), _counts(widths), len(rows), records, found.data_ptr(), work)
        return found

    def add_rows(self, sums: Sequence[Weighted]) -> None:
        assert self.sums is not None
        totals, rows, factors, betas = zip(*sums, strict=True)
        records = rows[0].shape[0]
        widths = [tensor.shape[1] for tensor in rows]
        work = threads(4 * records * sum(widths))
        places = (_places(totals), _places(rows), _places(factors))
        self.sums(*places, _counts(widths), _counts(betas), len(sums), records, work)


@functools.cache
def compiled(library: Path = LIBRARY) -> Compiled | None:
    """The compiled forms, if there is a library and it does what torch does."""
    found = Compiled(library)
    return None if found.lengths is None or found.sums is None or not _agrees(found) else found


def _places(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Where they lie in memory."""
    return (POINTER * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def _counts(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (COUNT * len(numbers))(*numbers)


def _agrees(ours: Compiled) -> bool:
    """Whether it does what torch does, for numbers of rows and columns that leave rests."""
    for records, beta in itertools.product((1, 4, 11), (0, 1)):
        rows = [torch.linspace(-3, 3, records * width).sin().view(records, width) for width in (1, 21, 2100, 70000)]
        factors = torch.linspace(0, 1, records)
        one, other = (
            [Weighted(torch.full(part.shape[1:], 1.0 if beta else torch.nan), part, factors, beta) for part in rows]
            for _ in range(2)
        )
        ours.add_rows(one)
        sums_by_torch(other)
        found = [(ours.squared_lengths(rows), lengths_by_torch(rows))]
        found += [(a.total, b.total) for a, b in zip(one, other, strict=True)]
        if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in found):
            return False
    return True
