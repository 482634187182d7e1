"""products.c: sums of outer products of rows, by weights for many tensors in one call, or written out for each record.

The compiled form is for float32 in main memory; torch does the same for everything else and where nothing was compiled.
"""

import ctypes
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from clipless.native.library import COUNT, POINTER, WORTH_A_THREAD, checked, function, threads, wave
from clipless.native.rows import fits, flat, squares_by_torch

# As in the source: how many rows and outputs are taken at a time, and with how many outputs or columns they need no room.
RUN, BLOCK, NEAR = 256, 256, 128
# So many products take as long as a byte that is read.
OPERATIONS = 4
# With fewer positions the products of a record are too small to be worth a tile.
FEWEST = 2


class Product(NamedTuple):
    """A sum to be made: total [o,i] = beta·total + Σ_b factors[b]·left[b]ᵀ·right[b], in place; with beta = 0 its old
    contents are ignored."""

    total: Tensor  # [o,i]
    left: Tensor  # [b,...], o numbers of each row
    right: Tensor  # [b,...], i numbers
    factors: Tensor  # [b]
    beta: int


class CompiledProducts(NamedTuple):
    """The compiled functions. They take contiguous float32 tensors in main memory; for anything else they return False or
    None, and nothing was done."""

    add: Callable[[Sequence[Product], float], bool]
    write: Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]


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
    elif not fast.add(sums, scale):
        for each in sums:
            if len(sums) == 1 or not fast.add([each], scale):
                products_by_torch([each], scale)


def written_out(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_t left[b,t]ᵀ·right[b,t] for each record, [b,o,i], and their squared lengths [b], for [b,t,o] and [b,t,i].

    >>> written_out(torch.ones(1, 3, 1), torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 4.0]]]))
    (tensor([[[3., 4.]]]), tensor([25.], dtype=torch.float64))
    """
    fast = compiled() if left.shape[1] >= FEWEST else None
    found = None if fast is None else fast.write(left.contiguous(), right.contiguous())
    return written_by_torch(left, right) if found is None else found


def products_by_torch(sums: Sequence[Product], scale: float) -> None:
    for total, left, right, factors, beta in sums:
        left, right, weights = flat(left), flat(right), (factors * scale).to(left.dtype).unsqueeze(1)
        if right.shape[1] < left.shape[1]:
            right = right * weights
        else:
            left = left * weights
        torch.addmm(total, left.mT, right, beta=beta, out=total)  # with `out=` autocast leaves it alone


def written_by_torch(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.bmm(left.mT, right, out=left.new_empty(len(left), left.shape[2], right.shape[2]))
    return made, squares_by_torch([made], [(0, 0, -1)], 1)[0]


def build(library: Path) -> CompiledProducts | None:
    run_add = function(library, "clipless_add_products", POINTER, COUNT, ctypes.c_double, POINTER, COUNT)
    run_write = function(library, "clipless_write_products", *[POINTER] * 4, COUNT, *[POINTER] * 2, COUNT)
    if run_add is None or run_write is None:
        return None

    def add(sums: Sequence[Product], scale: float) -> bool:
        last: Tensor | None = None
        listed: list[int] = []
        numbers, largest = 0, 0
        for total, left, right, weights, beta in sums:
            outputs, width = total.shape
            rows = left.shape[0]
            sizes = (left.numel(), right.shape[0], right.numel(), *weights.shape)
            suits = fits(total) and fits(left) and fits(right) and (weights is last or fits(weights))
            if not suits or sizes != (rows * outputs, rows, rows * width, rows):
                return False
            last = weights
            places = (total.data_ptr(), left.data_ptr(), right.data_ptr(), weights.data_ptr())
            listed += (*places, rows, outputs, width, beta)
            numbers += rows * outputs * width
            largest = max(largest, min(outputs, width))
        memory, workers = array("q", listed), _workers(numbers)
        room = _room(total, largest, workers)
        run_add(memory.buffer_info()[0], len(sums), scale, 0 if room is None else room.data_ptr(), workers)
        return True

    def write(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor] | None:
        records, rows, outputs = left.shape
        width = right.shape[2]
        if not (fits(left) and fits(right)) or right.shape[:2] != left.shape[:2]:
            return None
        made = left.new_empty(records, outputs, width)
        squares = left.new_empty(records, dtype=torch.float64)
        workers = max(1, min(records, _workers(left.numel() * width)))
        room, sizes = _room(left, min(outputs, width), workers), (COUNT * 3)(rows, outputs, width)
        places = [tensor.data_ptr() for tensor in (left, right, made, squares)]
        run_write(*places, records, sizes, 0 if room is None else room.data_ptr(), workers)
        return made, squares

    return CompiledProducts(add, write)


def _workers(products: int) -> int:
    work = products // OPERATIONS
    return 1 if work < WORTH_A_THREAD else threads(work)


def _room(like: Tensor, size: int, workers: int) -> Tensor | None:
    return like.new_empty(workers * RUN * BLOCK) if size > NEAR else None


def _pairs(ours: CompiledProducts) -> Iterator[tuple[Tensor, Tensor]]:
    """For sizes that fill no tile and no block, more rows, outputs and columns than are taken at a time, and more columns
    than outputs; a total that is kept and one that is not."""
    sizes = ((1, 1, 1), (64, 9, 37), (131, 16, 32), (270, 270, 133), (5, 7, 300), (0, 3, 2))
    for beta in (0, 1):
        found, expected = ([_example(*size, beta) for size in sizes] for _ in range(2))
        ours.add(found, 0.7)
        products_by_torch(expected, 0.7)
        yield from ((a.total, b.total) for a, b in zip(found, expected, strict=True))
    for b, t, o, i in ((2, 5, 9, 40), (3, 20, 140, 130)):
        left, right = wave(b, t, o), wave(b, t, i).add_(1)
        made, squares = written_by_torch(left, right)
        pair = ours.write(left, right) or (made * torch.nan, squares)
        yield from zip(pair, (made, squares), strict=True)


def _example(rows: int, outputs: int, width: int, beta: int) -> Product:
    total = torch.full((outputs, width), 1.0 if beta else torch.nan)
    return Product(total, wave(rows, outputs), wave(rows, width).add_(1), torch.linspace(0, 1, rows), beta)


compiled = checked(build, _pairs, rtol=1e-5, atol=1e-4)
