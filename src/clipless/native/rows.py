"""Rows of many tensors in one call: their squared lengths, and sums of them, or of their outer products, by weights.

Most parameters are small, and several calls of torch for each take longer than all the arithmetic. rows.c does it for
float32 in main memory; torch does the same, tensor by tensor, for everything else and where nothing was compiled.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from clipless.native.library import COUNT, POINTER, WORTH_A_THREAD, checked, function, threads

# So many columns are added up in the rows' own type.
BLOCK = 1024
# Squares below this lose digits to underflow in float32.
UNDERFLOW = 1e-30
# So few numbers are not worth a second thread, nor the question whether there is one.
FEW = WORTH_A_THREAD // 4
# Beyond so many products a matrix product of torch, in several threads, is faster.
MOST = 2**21


class Weighted(NamedTuple):
    """A sum to be made: total [n] = beta·total + Σ_b factors[b]·rows[b], in place; with beta = 0 whatever was there is
    forgotten."""

    total: Tensor  # [n]
    rows: Tensor  # [b,n]
    factors: Tensor  # [b]
    beta: int


class Product(NamedTuple):
    """A sum to be made: total [o,i] = beta·total + Σ_b factors[b]·left[b]ᵀ·right[b], in place; with beta = 0 its old
    contents are ignored."""

    total: Tensor  # [o,i]
    left: Tensor  # [b,o]
    right: Tensor  # [b,i]
    factors: Tensor  # [b]
    beta: int


class Rows(NamedTuple):
    """The compiled functions. They take contiguous float32 tensors in main memory, all with the same number of rows; for
    anything else the first returns None and the others False, and nothing was done."""

    squared_lengths: Callable[[Sequence[Tensor]], Tensor | None]
    add_rows: Callable[[Sequence[Weighted]], bool]
    add_products: Callable[[Sequence[Product]], bool]


def squared_lengths(rows: Sequence[Tensor]) -> Tensor:
    """‖row‖² for every row of tensors [b,n] of any widths n, [len(rows),b], in float64 where the device has it.

    >>> squared_lengths([torch.tensor([[3.0, 4.0]]), torch.ones(1, 5)])
    tensor([[25.],
            [ 5.]], dtype=torch.float64)
    """
    fast = compiled()
    found = None if fast is None else fast.squared_lengths(rows)
    return lengths_by_torch(rows) if found is None else found


def add_rows(sums: Sequence[Weighted]) -> None:
    """Make all these sums.

    >>> total = torch.tensor([1.0, torch.nan])
    >>> add_rows([Weighted(total, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 1.0]), beta=0)])
    >>> total
    tensor([13., 24.])
    """
    fast = compiled()
    if fast is None or not fast.add_rows(sums):
        sums_by_torch(sums)


def add_products(sums: Sequence[Product]) -> None:
    """Make all these sums.

    >>> total = torch.full((1, 2), torch.nan)
    >>> add_products([Product(total, torch.ones(2, 1), torch.eye(2), torch.tensor([3.0, 4.0]), beta=0)])
    >>> total
    tensor([[3., 4.]])
    """
    fast = compiled()
    if fast is None or not fast.add_products(sums):
        products_by_torch(sums)


def products_by_torch(sums: Sequence[Product]) -> None:
    for total, left, right, factors, beta in sums:
        weights = factors.to(left.dtype).unsqueeze(1)
        if right.shape[1] < left.shape[1]:
            right = right * weights
        else:
            left = left * weights
        torch.addmm(total, left.mT, right, beta=beta, out=total)


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


def sums_by_torch(sums: Sequence[Weighted]) -> None:
    for total, rows, factors, beta in sums:
        torch.addmv(total, rows.mT, factors.to(rows.dtype), beta=beta, out=total)


@functools.lru_cache(maxsize=64)
def widest(device: torch.device) -> torch.dtype:
    """The most exact type that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def build(library: Path) -> Rows | None:
    """The compiled functions of a library, if it has them."""
    lengths = function(library, "clipless_squared_lengths", POINTER, POINTER, COUNT, COUNT, POINTER, COUNT)
    add = function(library, "clipless_add_rows", *[POINTER] * 5, *[COUNT] * 3)
    multiply = function(library, "clipless_add_products", *[POINTER] * 7, *[COUNT] * 2)
    if lengths is None or add is None or multiply is None:
        return None

    def squared_lengths(rows: Sequence[Tensor]) -> Tensor | None:
        count, records = len(rows), rows[0].shape[0]
        places, widths, numbers = (POINTER * count)(), (COUNT * count)(), 0
        for k, tensor in enumerate(rows):
            if tensor.dtype is not torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
                return None
            if tensor.shape[0] != records:
                return None
            places[k], widths[k] = tensor.data_ptr(), tensor.shape[1]
            numbers += tensor.numel()
        found = torch.empty(count, records, dtype=torch.float64)
        lengths(places, widths, count, records, found.data_ptr(), 1 if numbers < FEW else threads(4 * numbers))
        return found

    def add_rows(sums: Sequence[Weighted]) -> bool:
        count, records, numbers, kept = len(sums), sums[0].rows.shape[0], 0, []
        places = [(POINTER * count)() for _ in range(3)]
        widths, betas = (COUNT * count)(), (COUNT * count)()
        for k, (total, rows, factors, beta) in enumerate(sums):
            if total.dtype is not torch.float32 or not total.is_cpu or not total.is_contiguous():
                return False
            if rows.dtype is not torch.float32 or not rows.is_cpu or not rows.is_contiguous():
                return False
            if rows.shape != (records, total.shape[0]) or factors.shape != (records,):
                return False
            factors = factors.to(torch.float32).contiguous()
            kept.append(factors)
            places[0][k], places[1][k], places[2][k] = total.data_ptr(), rows.data_ptr(), factors.data_ptr()
            widths[k], betas[k] = rows.shape[1], beta
            numbers += rows.numel()
        add(*places, widths, betas, count, records, 1 if numbers < FEW else threads(4 * numbers))
        return True

    return Rows(squared_lengths, add_rows, _products(multiply))


def _products(multiply: Callable[..., None]) -> Callable[[Sequence[Product]], bool]:
    def add_products(sums: Sequence[Product]) -> bool:
        count, records, kept = len(sums), sums[0].left.shape[0], []
        places, sizes = [(POINTER * count)() for _ in range(4)], [(COUNT * count)() for _ in range(3)]
        for k, (total, left, right, factors, beta) in enumerate(sums):
            outputs, width = total.shape
            if left.shape != (records, outputs) or right.shape != (records, width) or factors.shape != (records,):
                return False
            factors = factors.to(torch.float32).contiguous()
            kept.append(factors)
            for row, tensor in zip(places, (total, left, right, factors), strict=True):
                if tensor.dtype is not torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
                    return False
                row[k] = tensor.data_ptr()
            sizes[0][k], sizes[1][k], sizes[2][k] = outputs, width, beta
        multiply(*places, *sizes, count, records)
        return True

    return add_products


def _pairs(ours: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """For numbers of rows and columns that fill no block."""
    for records, beta in itertools.product((1, 4, 11), (0, 1)):
        rows = [torch.linspace(-3, 3, records * width).sin().view(records, width) for width in (1, 21, 2100, 70000)]
        factors = torch.linspace(0, 1, records)
        one, other = (
            [Weighted(torch.full(part.shape[1:], 1.0 if beta else torch.nan), part, factors, beta) for part in rows]
            for _ in range(2)
        )
        ours.add_rows(one)
        sums_by_torch(other)
        found = ours.squared_lengths(rows)
        yield (torch.empty(0) if found is None else found), lengths_by_torch(rows)
        yield from ((a.total, b.total) for a, b in zip(one, other, strict=True))
    for records, beta in itertools.product((1, 64, 131), (0, 1)):
        ours_, theirs = ([_example(records, o, i, beta) for o, i in ((1, 1), (9, 37), (16, 32))] for _ in range(2))
        ours.add_products(ours_)
        products_by_torch(theirs)
        yield from ((a.total, b.total) for a, b in zip(ours_, theirs, strict=True))


def _example(records: int, outputs: int, width: int, beta: int) -> Product:
    left, right = (torch.linspace(-3, 3, records * size).sin().view(records, size) for size in (outputs, width))
    return Product(
        torch.full((outputs, width), 1.0 if beta else torch.nan), left, right.cos(), torch.linspace(0, 1, records), beta
    )


compiled = checked(build, _pairs, rtol=1e-5, atol=1e-5)
