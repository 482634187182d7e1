"""products.c: weighted sums of outer products, for many small layers in one call."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from clipless.native.library import COUNT, POINTER, checked, function

# Beyond so many products a matrix product of torch, in several threads, is faster.
MOST = 2**21


class Product(NamedTuple):
    """A sum to be made: total [o,i] = beta·total + Σ_b factors[b]·left[b]ᵀ·right[b], in place. With beta = 0 old contents are
    ignored."""

    total: Tensor  # [o,i]
    left: Tensor  # [b,o]
    right: Tensor  # [b,i]
    factors: Tensor  # [b]
    beta: int


# Makes all these sums, of contiguous float32 tensors in main memory with the same number of records. For anything else it
# returns False, and nothing was done.
AddProducts = Callable[[Sequence[Product]], bool]


def add_products(sums: Sequence[Product]) -> None:
    """Make all these sums.

    >>> total = torch.full((1, 2), torch.nan)
    >>> add_products([Product(total, torch.ones(2, 1), torch.eye(2), torch.tensor([3.0, 4.0]), beta=0)])
    >>> total
    tensor([[3., 4.]])
    """
    fast = compiled()
    if fast is None or not fast(sums):
        products_by_torch(sums)


def products_by_torch(sums: Sequence[Product]) -> None:
    for total, left, right, factors, beta in sums:
        weights = factors.to(left.dtype).unsqueeze(1)
        if right.shape[1] < left.shape[1]:
            right = right * weights
        else:
            left = left * weights
        torch.addmm(total, left.mT, right, beta=beta, out=total)


def build(library: Path) -> AddProducts | None:
    run = function(library, "clipless_add_products", *[POINTER] * 7, *[COUNT] * 2)
    if run is None:
        return None

    def add(sums: Sequence[Product]) -> bool:
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
        run(*places, *sizes, count, records)
        return True

    return add


def _pairs(ours: AddProducts) -> Iterator[tuple[Tensor, Tensor]]:
    """For sizes that fill no tile, and more records than are added up in one run."""
    for records, beta in itertools.product((1, 64, 131), (0, 1)):
        one, other = ([_example(records, o, i, beta) for o, i in ((1, 1), (9, 37), (16, 32))] for _ in range(2))
        if not ours(one):
            yield torch.zeros(1), torch.ones(1)
        products_by_torch(other)
        yield from ((a.total, b.total) for a, b in zip(one, other, strict=True))


def _example(records: int, outputs: int, width: int, beta: int) -> Product:
    left, right = (torch.linspace(-3, 3, records * size).sin().view(records, size) for size in (outputs, width))
    return Product(
        torch.full((outputs, width), 1.0 if beta else torch.nan), left, right.cos(), torch.linspace(0, 1, records), beta
    )


compiled = checked(build, _pairs, rtol=1e-4, atol=1e-4)
