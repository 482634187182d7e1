"""Rows, each times its factor, added up."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from clipless.compiled import COUNT, POINTER, function, threads

Adds = Callable[[Tensor, Tensor, Tensor, int], None]


def add_rows(total: Tensor, rows: Tensor, factors: Tensor, beta: int) -> None:
    """total [n] = beta·total + Σ_b factors[b]·rows[b], in place; with beta = 0 whatever was there is forgotten.

    >>> total = torch.tensor([1.0, torch.nan])
    >>> add_rows(total, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 1.0]), beta=0)
    >>> total
    tensor([13., 24.])
    """
    fits = all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in (total, rows))
    adds = compiled() if fits else None
    (adds or by_torch)(total, rows, factors.to(rows.dtype), beta)


def by_torch(total: Tensor, rows: Tensor, factors: Tensor, beta: int) -> None:
    torch.addmv(total, rows.mT, factors, beta=beta, out=total)


@functools.cache
def compiled() -> Adds | None:
    """The compiled form, if there is a library and it does what torch does."""
    add = function("clipless_add_rows", *[POINTER] * 3, *[COUNT] * 4)
    if add is None:
        return None

    def adds(total: Tensor, rows: Tensor, factors: Tensor, beta: int) -> None:
        places = (total.data_ptr(), rows.data_ptr(), factors.contiguous().data_ptr())
        add(*places, *rows.shape, beta, threads(rows.nbytes))

    return adds if _agrees(adds) else None


def _agrees(adds: Adds) -> bool:
    """Whether it does what torch does, for numbers of rows and columns that leave rests."""
    for count, width, beta in ((1, 1, 0), (6, 5, 1), (11, 2100, 0), (4, 70000, 1)):
        rows = torch.linspace(-3, 3, count * width).view(count, width).sin()
        factors = torch.linspace(0, 1, count)
        ours, theirs = (torch.linspace(-1, 1, width) if beta else torch.full((width,), torch.nan) for _ in range(2))
        adds(ours, rows, factors, beta)
        by_torch(theirs, rows, factors, beta)
        if not torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5):
            return False
    return True
