"""What rows.c does, by torch: for any type and device, tensor by tensor."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# So many columns are added up in the rows' own type.
BLOCK = 1024
# As in rows.c: so many terms are added up in a run, and in a chunk of runs.
RUN, TERMS = 64, 256
# Squares below this lose digits to underflow in float32.
UNDERFLOW = 1e-30


class Weighted(NamedTuple):
    """A sum to be made: total [n] = beta·total + Σ_b factors[b]·rows[b], in place; with beta = 0 whatever was there is
    forgotten."""

    total: Tensor  # [...], n numbers
    rows: Tensor  # [b,...], n numbers of each record
    factors: Tensor  # [b]
    beta: int


class Product(NamedTuple):
    """A sum to be made: total [o,i] = beta·total + Σ_b factors[b]·left[b]ᵀ·right[b], in place; with beta = 0 its old
    contents are ignored."""

    total: Tensor  # [o,i]
    left: Tensor  # [b,...], o numbers of each row
    right: Tensor  # [b,...], i numbers
    factors: Tensor  # [b]
    beta: int


# The number of a group, of a tensor, and of another tensor or -1.
Term = tuple[int, int, int]


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
        line, weights = total.view(-1), (factors * scale).to(rows.dtype)
        add_in_runs(torch.addmv, line, flat(rows).mT, weights, beta)


def products_by_torch(sums: Sequence[Product], scale: float) -> None:
    for total, left, right, factors, beta in sums:
        left, right, weights = flat(left), flat(right), (factors * scale).to(left.dtype).unsqueeze(1)
        if right.shape[1] < left.shape[1]:
            right = right * weights
        else:
            left = left * weights
        add_in_runs(torch.addmm, total, left.mT, right, beta)


def add_in_runs(add: Callable[..., Tensor], total: Tensor, left: Tensor, right: Tensor, beta: int) -> None:
    """total = beta·total + left·right for `left` [...,n] and `right` [n,...], the n terms added up in runs and in chunks, so
    that rounding errors stay small. `add` is torch's, with `beta` and `out`: so autocast leaves it alone."""
    terms = len(right)
    if terms <= RUN or total.dtype is not torch.float32:
        add(total, left, right, beta=beta, out=total)
        return
    for first in range(0, terms, TERMS):
        chunk = torch.empty_like(total) if first or beta else total
        for begin in range(first, min(first + TERMS, terms), RUN):
            some = slice(begin, min(begin + RUN, first + TERMS, terms))
            add(chunk, left[..., some], right[some], beta=int(begin > first), out=chunk)
        if chunk is not total:
            total += chunk


def written_by_torch(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.bmm(left.mT, right, out=left.new_empty(len(left), left.shape[2], right.shape[2]))
    return made, squares_by_torch([made], [(0, 0, -1)], 1)[0]


@functools.lru_cache(maxsize=64)
def widest(device: torch.device) -> torch.dtype:
    """The most exact type that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64
