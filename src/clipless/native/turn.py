"""turn.c: rows times their weights, turned, as oneDNN takes the first factor of a product over the rows."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from clipless.native.library import COUNT, POINTER, checked, function, threads

# Rows [n,w] and their weights [n], float32 in main memory without gaps; to [w,n].
TurnRows = Callable[[Tensor, Tensor], Tensor]


def turned(rows: Tensor, weights: Tensor) -> Tensor:
    """(rows · weights)ᵀ in memory of its own, for rows [n,w] and weights [n].

    >>> turned(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 10.0]))
    tensor([[ 1., 30.],
            [ 2., 40.]])
    """
    fits = all(each.dtype is torch.float32 and each.is_cpu and each.is_contiguous() for each in (rows, weights))
    fast = compiled() if fits else None
    return turned_by_torch(rows, weights) if fast is None else fast(rows, weights)


def turned_by_torch(rows: Tensor, weights: Tensor) -> Tensor:
    return (rows * weights.unsqueeze(1)).mT.contiguous()


def build(library: Path) -> TurnRows | None:
    run = function(library, "clipless_turn", *[POINTER] * 3, *[COUNT] * 3)
    if run is None:
        return None

    def turn(rows: Tensor, weights: Tensor) -> Tensor:
        count, width = rows.shape
        if weights.shape != (count,):
            raise ValueError(f"{count} rows have {tuple(weights.shape)} weights.")
        made = rows.new_empty(width, count)
        run(rows.data_ptr(), weights.data_ptr(), made.data_ptr(), count, width, threads(2 * rows.nbytes))
        return made

    return turn


def _pairs(ours: TurnRows) -> Iterator[tuple[Tensor, Tensor]]:
    """For sizes that fill no block."""
    for count, width in ((1, 1), (37, 5), (64, 33), (700, 130)):
        rows, weights = torch.linspace(-3, 3, count * width).view(count, width), torch.linspace(-1, 2, count)
        yield ours(rows, weights), turned_by_torch(rows, weights)


compiled = checked(build, _pairs)
