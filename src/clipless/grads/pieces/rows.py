"""Rows of many tensors in one call: their squared lengths, and their sums by weights.

Most parameters are small, and several calls of torch for each take longer than all the arithmetic. The compiled code is
for float32 in main memory; torch does the same, tensor by tensor, for everything else and where nothing was compiled.
"""

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from clipless.compiled import COUNT, LIBRARY, POINTER, function, threads

# So many columns are added up in the rows' own type.
BLOCK = 1024
# Squares below this lose digits to underflow in float32.
UNDERFLOW = 1e-30


class Weighted(NamedTuple):
    """A sum to be made: total [n] = beta·total + Σ_b factors[b]·rows[b], in place; with beta = 0 whatever was there is
    forgotten."""

    total: Tensor  # [n]
    rows: Tensor  # [b,n]
    factors: Tensor  # [b]
    beta: int


def squared_lengths(rows: Sequence[Tensor]) -> Tensor:
    """Of tensors [b,n], with n as it may be, ‖row‖² for every row, [len(rows),b], in float64 where the device has it.

    >>> squared_lengths([torch.tensor([[3.0, 4.0]]), torch.ones(1, 5)])
    tensor([[25.],
            [ 5.]], dtype=torch.float64)
    """
    fast = compiled()
    if fast is None or not all(_suits(tensor) and len(tensor) == len(rows[0]) for tensor in rows):
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
    if fast is None or not all(_fits(one, len(sums[0].rows)) for one in sums):
        sums_by_torch(sums)
    else:
        fast.add_rows([one._replace(factors=one.factors.to(torch.float32).contiguous()) for one in sums])


def _fits(one: Weighted, records: int) -> bool:
    shapes = one.rows.shape == (records, len(one.total)) and one.factors.shape == (records,)
    return shapes and _suits(one.total) and _suits(one.rows)


def _suits(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def lengths_by_torch(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack([_lengths(tensor) for tensor in rows])


def _lengths(rows: Tensor) -> Tensor:
    """`vector_norm` is much faster than a sum of squares, but adds up in the rows' own type: so by blocks of columns, which
    are then added up in float64. Rows whose squares could be lost are squared in float64."""
    whole, wide = rows.shape[1] - rows.shape[1] % BLOCK, widest(rows.device)
    parts = [rows[:, :whole].unflatten(1, (-1, BLOCK)), rows[:, whole:].unsqueeze(1)] if whole else [rows.unsqueeze(1)]
    squares = sum(torch.linalg.vector_norm(part, dim=2).to(wide).square().sum(1) for part in parts)
    assert isinstance(squares, Tensor)
    tiny = squares < rows.shape[1] * UNDERFLOW
    if rows.dtype != torch.float64 and tiny.any():
        squares[tiny] = rows[tiny].to(wide).square().sum(1)
    return squares


def widest(device: torch.device) -> torch.dtype:
    """The most exact type that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def sums_by_torch(sums: Sequence[Weighted]) -> None:
    for total, rows, factors, beta in sums:
        torch.addmv(total, rows.mT, factors.to(rows.dtype), beta=beta, out=total)


class Compiled(NamedTuple):
    """The compiled forms of both, for what suits them."""

    squared_lengths: Callable[[Sequence[Tensor]], Tensor]
    add_rows: Callable[[Sequence[Weighted]], None]


@functools.cache
def compiled(library: Path = LIBRARY) -> Compiled | None:
    """The compiled forms, if there is a library and it does what torch does."""
    lengths = function("clipless_squared_lengths", POINTER, POINTER, COUNT, COUNT, POINTER, COUNT, library=library)
    add = function("clipless_add_rows", *[POINTER] * 5, *[COUNT] * 3, library=library)
    if lengths is None or add is None:
        return None

    def squared_lengths(rows: Sequence[Tensor]) -> Tensor:
        records, widths = len(rows[0]), [tensor.shape[1] for tensor in rows]
        found = torch.empty(len(rows), records, dtype=torch.float64)
        lengths(
            _places(rows), _counts(widths), len(rows), records, found.data_ptr(), threads(4 * records * sum(widths))
        )
        return found

    def add_rows(sums: Sequence[Weighted]) -> None:
        totals, rows, factors, betas = zip(*sums, strict=True)
        records, widths = len(rows[0]), [tensor.shape[1] for tensor in rows]
        places = (_places(totals), _places(rows), _places(factors))
        add(*places, _counts(widths), _counts(betas), len(sums), records, threads(4 * records * sum(widths)))

    found = Compiled(squared_lengths, add_rows)
    return found if _agrees(found) else None


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
