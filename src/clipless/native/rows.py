"""Rows of many tensors in one call: their squared lengths, and sums of them, or of their outer products, by weights.

Most parameters are small, and several calls of torch for each take longer than all the arithmetic. rows.c does it for
float32 in main memory; torch does the same, tensor by tensor, for everything else and where nothing was compiled.
"""

import ctypes
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from clipless.native.by_torch import (
    Product,
    Term,
    Weighted,
    norms_by_torch,
    products_by_torch,
    squares_by_torch,
    sums_by_torch,
    written_by_torch,
)
from clipless.native.library import COUNT, POINTER, WORTH_A_THREAD, checked, function, threads, wave

# So few numbers are not worth a second thread, nor the question whether there is one.
FEW = WORTH_A_THREAD // 4
# As in the source: how many terms and outputs are taken at a time, and with how many outputs or columns they need no room.
TERMS, BLOCK, NEAR = 256, 256, 128
# So many products take as long as a byte that is read.
OPERATIONS = 4
# With fewer positions torch writes out what a record adds up to.
FEWEST = 2


class Rows(NamedTuple):
    """The compiled functions. They take contiguous float32 tensors in main memory, all but `add_products` with the same
    number of rows; for anything else they return None or False, and nothing was done."""

    squares: Callable[[Sequence[Tensor], Sequence[Term], int], Tensor | None]
    norms: Callable[[Tensor, torch.dtype, float, float], tuple[Tensor, bool] | None]
    add_rows: Callable[[Sequence[Weighted], float], bool]
    add_products: Callable[[Sequence[Product], float], bool]
    write_products: Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]


def squared_lengths(rows: Sequence[Tensor]) -> Tensor:
    """‖row‖² for every row of tensors [b,...] of any shapes, [len(rows),b], in float64 where the device has it.

    >>> squared_lengths([torch.tensor([[3.0, 4.0]]), torch.ones(1, 5)])
    tensor([[25.],
            [ 5.]], dtype=torch.float64)
    """
    return squares(rows, [(k, k, -1) for k in range(len(rows))], len(rows))


def squares(rows: Sequence[Tensor], terms: Sequence[Term], groups: int) -> Tensor:
    """Sums of squared lengths for so many groups, [groups,b], in float64 where the device has it: a term (group, k, j) adds
    ‖row of tensor k‖²·‖row of tensor j‖² to its group, without the second factor if j is negative.

    >>> squares([torch.tensor([[3.0, 4.0]]), torch.ones(1, 5)], [(0, 0, 1), (0, 1, -1)], 1)
    tensor([[130.]], dtype=torch.float64)
    """
    fast = compiled()
    found = None if fast is None else fast.squares(rows, terms, groups)
    return squares_by_torch(rows, terms, groups) if found is None else found


def norms(squared: Tensor, dtype: torch.dtype, scale: float, least: float) -> tuple[Tensor, bool]:
    """Roots of these numbers, which may be overwritten, times a scale: infinite if not finite, zero if not above `least`.
    Also whether none of them is infinite or zero.

    >>> norms(torch.tensor([[4.0, 1e-9, torch.nan]]), torch.float32, 3.0, 1e-3)
    (tensor([[6., 0., inf]]), False)
    """
    fast = compiled()
    found = None if fast is None else fast.norms(squared, dtype, scale, least)
    return norms_by_torch(squared, dtype, scale, least) if found is None else found


def add_rows(sums: Sequence[Weighted], scale: float = 1.0) -> None:
    """Make all these sums, with all factors times a scale.

    >>> total = torch.tensor([1.0, torch.nan])
    >>> add_rows([Weighted(total, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 1.0]), beta=0)])
    >>> total
    tensor([13., 24.])
    """
    fast = compiled()
    if fast is None or not fast.add_rows(sums, scale):
        sums_by_torch(sums, scale)


def add_products(sums: Sequence[Product], scale: float = 1.0) -> None:
    """Make all these sums, with all factors times a scale.

    >>> total = torch.full((1, 2), torch.nan)
    >>> add_products([Product(total, torch.ones(2, 1), torch.eye(2), torch.tensor([3.0, 4.0]), beta=0)])
    >>> total
    tensor([[3., 4.]])
    """
    fast = compiled()
    if fast is None:
        products_by_torch(sums, scale)
    elif not fast.add_products(sums, scale):
        for each in sums:
            if len(sums) == 1 or not fast.add_products([each], scale):
                products_by_torch([each], scale)


def written_out(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_t left[b,t]ᵀ·right[b,t] for each record, [b,o,i], and their squared lengths [b], for [b,t,o] and [b,t,i].

    >>> written_out(torch.ones(1, 3, 1), torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 4.0]]]))
    (tensor([[[3., 4.]]]), tensor([25.], dtype=torch.float64))
    """
    fast = compiled() if left.shape[1] >= FEWEST else None
    found = None if fast is None else fast.write_products(left.contiguous(), right.contiguous())
    return written_by_torch(left, right) if found is None else found


def build(library: Path) -> Rows | None:
    """The compiled functions of a library, if it has them."""
    square = function(library, "clipless_squares", POINTER, COUNT, *[POINTER] * 2, COUNT, POINTER, *[COUNT] * 3)
    root = function(library, "clipless_norms", *[POINTER] * 2, COUNT, *[ctypes.c_double] * 2, POINTER)
    add = function(library, "clipless_add_rows", POINTER, COUNT, ctypes.c_double, *[COUNT] * 2)
    multiply = function(library, "clipless_add_products", POINTER, COUNT, ctypes.c_double, POINTER, COUNT)
    write = function(library, "clipless_write_products", *[POINTER] * 4, COUNT, *[POINTER] * 2, COUNT)
    if square is None or root is None or add is None or multiply is None or write is None:
        return None

    def squares(rows: Sequence[Tensor], terms: Sequence[Term], groups: int) -> Tensor | None:
        listed: list[int] = []
        count, records, numbers = len(rows), rows[0].shape[0], 0
        for tensor in rows:
            if not fit(tensor) or tensor.shape[0] != records:
                return None
            listed += (tensor.data_ptr(), tensor.numel() // max(records, 1))
            numbers += tensor.numel()
        listed.extend(itertools.chain(*terms))
        room, found = (torch.empty(size, records, dtype=torch.float64, device="cpu") for size in (count, groups))
        memory, sizes = array("q", listed), (groups, records, 1 if numbers < FEW else threads(numbers))
        place, end = memory.buffer_info()[0], 2 * count * memory.itemsize
        square(place, count, room.data_ptr(), place + end, len(terms), found.data_ptr(), *sizes)
        return found

    def norms(squared: Tensor, dtype: torch.dtype, scale: float, least: float) -> tuple[Tensor, bool] | None:
        if dtype is not torch.float32 or squared.dtype is not torch.float64 or not squared.is_cpu:
            return None
        squared, unusual = squared.contiguous(), COUNT()
        found = torch.empty_like(squared, dtype=dtype)
        root(squared.data_ptr(), found.data_ptr(), found.numel(), scale, least, ctypes.byref(unusual))
        return found, not unusual.value

    return Rows(squares, norms, _rows(add), _products(multiply), _written(write))


def fit(*tensors: Tensor) -> bool:
    """Whether the compiled functions take these."""
    for each in tensors:  # a generator would take as long again
        if each.dtype is torch.float32 and each.is_cpu and each.is_contiguous():
            continue
        return False
    return True


def _rows(add: Callable[..., None]) -> Callable[[Sequence[Weighted], float], bool]:
    def add_rows(sums: Sequence[Weighted], scale: float) -> bool:
        last: Tensor | None = None
        listed: list[int] = []
        records, numbers = sums[0].rows.shape[0], 0
        for total, rows, weights, beta in sums:
            width = total.numel()
            suits = fit(total, rows) and rows.shape[0] == records and rows.numel() == records * width
            if not suits or (weights is not last and not (fit(weights) and weights.shape == (records,))):
                return False
            last = weights  # one tensor for all sums of a group
            listed += (total.data_ptr(), rows.data_ptr(), weights.data_ptr(), width, beta)
            numbers += records * width
        memory = array("q", listed)
        add(memory.buffer_info()[0], len(sums), scale, records, 1 if numbers < FEW else threads(4 * numbers))
        return True

    return add_rows


def _products(multiply: Callable[..., None]) -> Callable[[Sequence[Product], float], bool]:
    def add_products(sums: Sequence[Product], scale: float) -> bool:
        last: Tensor | None = None
        listed: list[int] = []
        numbers, largest = 0, 0
        for total, left, right, weights, beta in sums:
            outputs, width = total.shape
            rows = left.shape[0]
            sizes = (left.numel(), right.shape[0], right.numel(), *weights.shape)
            suits = fit(total, left, right) and (weights is last or fit(weights))
            if not suits or sizes != (rows * outputs, rows, rows * width, rows):
                return False
            last = weights
            places = (total.data_ptr(), left.data_ptr(), right.data_ptr(), weights.data_ptr())
            listed += (*places, rows, outputs, width, beta)
            numbers += rows * outputs * width
            largest = max(largest, min(outputs, width))
        memory, workers = array("q", listed), _workers(numbers)
        room = _room(total, largest, workers)
        multiply(memory.buffer_info()[0], len(sums), scale, 0 if room is None else room.data_ptr(), workers)
        return True

    return add_products


def _written(write: Callable[..., None]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    def write_products(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor] | None:
        records, rows, outputs = left.shape
        width = right.shape[2]
        if not fit(left, right) or right.shape[:2] != left.shape[:2]:
            return None
        made = left.new_empty(records, outputs, width)
        squares = left.new_empty(records, dtype=torch.float64)
        workers = max(1, min(records, _workers(left.numel() * width)))
        room, sizes = _room(left, min(outputs, width), workers), (COUNT * 3)(rows, outputs, width)
        places = [tensor.data_ptr() for tensor in (left, right, made, squares)]
        write(*places, records, sizes, 0 if room is None else room.data_ptr(), workers)
        return made, squares

    return write_products


def _workers(products: int) -> int:
    work = products // OPERATIONS
    return 1 if work < WORTH_A_THREAD else threads(work)


def _room(like: Tensor, size: int, workers: int) -> Tensor | None:
    return like.new_empty(workers * TERMS * BLOCK) if size > NEAR else None


def _pairs(ours: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    yield from _pairs_of_rows(ours)
    yield from _pairs_of_products(ours)


def _pairs_of_rows(ours: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """For numbers of rows and columns that fill no block, and more rows than are taken at a time."""
    sizes = ((1, (1, 21, 2100, 70000)), (4, (1, 21, 2100, 70000)), (11, (1, 21, 2100, 70000)), (300, (1, 21, 40, 7)))
    for (records, widths), beta in itertools.product(sizes, (0, 1)):
        rows = [torch.linspace(-3, 3, records * width).sin().view(records, width) for width in widths]
        factors = torch.linspace(0, 1, records)
        one, other = (
            [Weighted(torch.full(part.shape[1:], 1.0 if beta else torch.nan), part, factors, beta) for part in rows]
            for _ in range(2)
        )
        ours.add_rows(one, 0.7)
        sums_by_torch(other, 0.7)
        terms = [(0, 2, 1), (2, 3, -1), (0, 1, -1), (1, 0, -1)]
        found, expected = ours.squares(rows, terms, 3), squares_by_torch(rows, terms, 3)
        yield (torch.full_like(expected, torch.nan) if found is None else found), expected
        yield from ((a.total, b.total) for a, b in zip(one, other, strict=True))
    squared = torch.tensor([[4.0, 0.0, 1e-40, torch.nan], [-1.0, torch.inf, 1e300, 1e-20]], dtype=torch.float64)
    for some in (squared, squared[:, :1].abs()):
        rooted = ours.norms(some.clone(), torch.float32, 3.0, 1e-15)
        expected, usual = norms_by_torch(some.clone(), torch.float32, 3.0, 1e-15)
        yield (torch.full_like(expected, torch.nan) if rooted is None or rooted[1] != usual else rooted[0]), expected


def _pairs_of_products(ours: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """For sizes that fill no tile and no block, more rows, outputs and columns than are taken at a time, and more columns
    than outputs; a total that is kept and one that is not."""
    sizes = ((1, 1, 1), (64, 9, 37), (131, 16, 32), (270, 270, 133), (5, 7, 300), (0, 3, 2))
    for beta in (0, 1):
        found, expected = ([_example(*size, beta) for size in sizes] for _ in range(2))
        ours.add_products(found, 0.7)
        products_by_torch(expected, 0.7)
        yield from ((a.total, b.total) for a, b in zip(found, expected, strict=True))
    for b, t, o, i in ((2, 5, 9, 40), (3, 20, 140, 130)):
        left, right = wave(b, t, o), wave(b, t, i).add_(1)
        made, squares = written_by_torch(left, right)
        pair = ours.write_products(left, right) or (made * torch.nan, squares)
        yield from zip(pair, (made, squares), strict=True)


def _example(rows: int, outputs: int, width: int, beta: int) -> Product:
    total = torch.full((outputs, width), 1.0 if beta else torch.nan)
    return Product(total, wave(rows, outputs), wave(rows, width).add_(1), torch.linspace(0, 1, rows), beta)


compiled = checked(build, _pairs, rtol=1e-5, atol=1e-5)
