"""Rows of many tensors in one call: their squared lengths, and sums of them by weights.

Most parameters are small, and several calls of torch for each take longer than all the arithmetic. rows.c does it for
float32 in main memory; torch does the same, tensor by tensor, for everything else and where nothing was compiled.
"""

import ctypes
import functools
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clipless.native.library import COUNT, POINTER, WORTH_A_THREAD, checked, function, threads

# So many columns are added up in the rows' own type.
BLOCK = 1024
# Squares below this lose digits to underflow in float32.
UNDERFLOW = 1e-30
# So few numbers are not worth a second thread, nor the question whether there is one.
FEW = WORTH_A_THREAD // 4


class Weighted(NamedTuple):
    """A sum to be made: total [n] = beta·total + Σ_b factors[b]·rows[b], in place; with beta = 0 whatever was there is
    forgotten."""

    total: Tensor  # [...], n numbers
    rows: Tensor  # [b,...], n numbers of each record
    factors: Tensor  # [b]
    beta: int


# The number of a group, of a tensor, and of another tensor or -1.
Term = tuple[int, int, int]


class Rows(NamedTuple):
    """The compiled functions. They take contiguous float32 tensors in main memory, all with the same number of rows; for
    anything else they return None or False, and nothing was done."""

    squares: Callable[[Sequence[Tensor], Sequence[Term], int], Tensor | None]
    norms: Callable[[Tensor, torch.dtype, float, float], tuple[Tensor, bool] | None]
    add_rows: Callable[[Sequence[Weighted], float], bool]


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


def squares_by_torch(rows: Sequence[Tensor], terms: Sequence[Term], groups: int) -> Tensor:
    lengths = torch.stack([_lengths(flat(tensor)) for tensor in rows])
    which, one, other = torch.tensor(terms, device=lengths.device).unbind(1)
    added = lengths[one] * torch.where((other < 0).unsqueeze(1), 1.0, lengths[other])
    return lengths.new_zeros(groups, lengths.shape[1]).index_add_(0, which, added)


def norms_by_torch(squared: Tensor, dtype: torch.dtype, scale: float, least: float) -> tuple[Tensor, bool]:
    found = squared.to(dtype).sqrt_()
    usual = not found.numel()
    if not usual:
        lowest, highest = found.aminmax()  # a norm that is NaN makes both NaN, and no comparison true
        usual = float(lowest) > least and float(highest) < torch.inf
    if not usual:
        found = F.threshold(found.nan_to_num_(nan=torch.inf, posinf=torch.inf), least, 0.0)
    return found.mul_(scale), usual


def flat(tensor: Tensor) -> Tensor:
    """[b,...] as [b,n]."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)


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


def sums_by_torch(sums: Sequence[Weighted], scale: float) -> None:
    for total, rows, factors, beta in sums:
        line = total.view(-1)
        torch.addmv(line, flat(rows).mT, (factors * scale).to(rows.dtype), beta=beta, out=line)


@functools.lru_cache(maxsize=64)
def widest(device: torch.device) -> torch.dtype:
    """The most exact type that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def build(library: Path) -> Rows | None:
    """The compiled functions of a library, if it has them."""
    square = function(library, "clipless_squares", POINTER, COUNT, *[POINTER] * 2, COUNT, POINTER, *[COUNT] * 3)
    root = function(library, "clipless_norms", *[POINTER] * 2, COUNT, *[ctypes.c_double] * 2, POINTER)
    add = function(library, "clipless_add_rows", POINTER, COUNT, ctypes.c_double, *[COUNT] * 2)
    if square is None or root is None or add is None:
        return None

    def squares(rows: Sequence[Tensor], terms: Sequence[Term], groups: int) -> Tensor | None:
        listed: list[int] = []
        count, records, numbers = len(rows), rows[0].shape[0], 0
        for tensor in rows:
            if not fits(tensor) or tensor.shape[0] != records:
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

    return Rows(squares, norms, _rows(add))


def fits(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def _rows(add: Callable[..., None]) -> Callable[[Sequence[Weighted], float], bool]:
    def add_rows(sums: Sequence[Weighted], scale: float) -> bool:
        last: Tensor | None = None
        listed: list[int] = []
        records, numbers = sums[0].rows.shape[0], 0
        for total, rows, weights, beta in sums:
            width = total.numel()
            suits = fits(total) and fits(rows) and rows.shape[0] == records and rows.numel() == records * width
            if not suits or (weights is not last and not (fits(weights) and weights.shape == (records,))):
                return False
            last = weights  # one tensor for all sums of a group
            listed += (total.data_ptr(), rows.data_ptr(), weights.data_ptr(), width, beta)
            numbers += records * width
        memory = array("q", listed)
        add(memory.buffer_info()[0], len(sums), scale, records, 1 if numbers < FEW else threads(4 * numbers))
        return True

    return add_rows


def _pairs(ours: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """For numbers of rows and columns that fill no block."""
    for records, beta in itertools.product((1, 4, 11), (0, 1)):
        rows = [torch.linspace(-3, 3, records * width).sin().view(records, width) for width in (1, 21, 2100, 70000)]
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


compiled = checked(build, _pairs, rtol=1e-5, atol=1e-5)
