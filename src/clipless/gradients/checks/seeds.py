"""Do the records stay apart? Found by backward passes whose losses are multiplied, each record's by a number of its own.

Where no gradient of one record depends on another record's loss, a record's share of every gradient in the model is
multiplied by its own number, and by nothing else. The numbers, the *seeds*, are powers of two: floating-point numbers are
multiplied by them without rounding, in every type, so for records that stay apart the two passes agree to the last bit. A
row that holds two records, a row that belongs to another record, a loss that couples the records: none of them agrees.

Index legend: b record, r row (all that is left of a record's gradient), k direction.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from clipless.gradients.layers.rule import at_least_float32

# Exponents of the seeds. Sixteen bits of float16 have no room for more; all other types share float32's exponents.
WIDE, NARROW = 32, 4
# Directions onto which long rows are projected: what is kept between two passes is a fraction of the gradients.
DIRECTIONS = 4
# A deviation of a row that counts, over the length of the row plus this share of the longest row's: the rest is rounding.
IMPURE = 1e-3
SILENT = 1e-6


def seed_passes(
    records: int, dtype: torch.dtype, device: torch.device, number: int, naming: bool = False
) -> list[Tensor]:
    """The seeds of one or two passes, each [b]: up to 1,024 records no two have the same in both, above it one pair in
    1,024 has. Which these are depends on the number of the check. If they are for `naming` the records of rows, there are
    as many passes as it takes that no two records have the same in all.

    >>> one, two = seed_passes(40, torch.float32, torch.device("cpu"), 0)
    >>> len({(float(a), float(b)) for a, b in zip(one, two)})
    40
    """
    base = NARROW if dtype is torch.float16 else WIDE
    names = shuffled(records, number)
    spread = (base - 1) // max(records - 1, 1)
    digits = [names * spread] if records <= base else [names % base, names // base % base]
    while naming and base ** len(digits) < records:
        digits.append(names // base ** len(digits) % base)
    return [torch.exp2(digit.double()).to(device, dtype) for digit in digits]


def sketch(grad: Tensor, dim: int) -> Tensor:
    """What is kept of a gradient whose records lie along `dim`, [k,b,r]: its rows, or projections of long ones. The short
    dimension comes first, where reducing it is fast."""
    moved = at_least_float32(grad.detach().movedim(dim, 0) if grad.dim() else grad.detach().view(1))
    width = moved.shape[-1] if moved.dim() > 1 else 1
    rows = moved.reshape(-1, width)
    kept = rows @ _directions(width, rows.dtype, rows.device) if width > DIRECTIONS else rows
    return (
        kept.t()
        .reshape(kept.shape[1], len(moved), -1 if len(moved) else 0)
        .clone(memory_format=torch.contiguous_format)
    )


def rows_of(sketched: Tensor) -> Tensor:
    """Everything that a sketch keeps of each record, [b,n]."""
    return sketched.transpose(0, 1).flatten(1)


@functools.lru_cache(maxsize=256)
def _directions(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (_scattered(width * DIRECTIONS, width) - 0.5).view(width, DIRECTIONS).to(device, dtype)


def shuffled(count: int, number: int) -> Tensor:
    """The first `count` whole numbers in an order without meaning, another one for another number."""
    return _scattered(count, number).argsort()


def some_of(records: int, number: int) -> Tensor:
    """Half of two or more records, as a mask; others for another number.

    >>> some_of(5, 1).sum(), some_of(5, 2).sum()
    (tensor(2), tensor(2))
    """
    return shuffled(records, number) < records // 2


def _scattered(count: int, number: int) -> Tensor:
    """Numbers between 0 and 1 without a pattern. They hide nothing and are not random: no generator is asked for them."""
    return (torch.sin(torch.arange(1, count + 1, dtype=torch.float64) * 12.9898 + number * 78.233) * 43758.5453) % 1


def impurity(plain: Tensor, seeded: Tensor, seeds: Tensor) -> float:
    """How far the seeded rows of a sketch are from the plain ones times their seeds, relative, at worst. Rows that are not
    finite in either pass tell nothing; 0 if no row tells anything.

    >>> rows, seeds = torch.ones(1, 2, 1), torch.tensor([1.0, 4.0])
    >>> apart, mixed = torch.tensor([[[1.0], [4.0]]]), torch.tensor([[[2.5], [2.5]]])
    >>> impurity(rows, apart, seeds), impurity(rows, mixed, seeds) > 0.3
    (0.0, True)
    """
    times = seeds.to(plain).view(-1, 1)
    expected = plain * times
    lengths, apart = (
        plain.abs().amax(0),
        (seeded - expected).abs_().amax(0),
    )  # [b,r]; not finite where either pass is not
    told = lengths.isfinite() & apart.isfinite()
    lengths = torch.where(told, lengths, 0.0)
    floor = SILENT * float(lengths.max()) if lengths.numel() else 0.0
    size = ((lengths + floor) * times).clamp_(min=torch.finfo(plain.dtype).tiny)
    return float(torch.where(told, apart / size, 0.0).max()) if lengths.numel() else 0.0


def named_records(plain: Tensor, seeded: Sequence[Tensor], seeds: Sequence[Tensor]) -> Tensor | None:
    """The record of each row of a sketch, [n], by the seeds that its gradient was multiplied by; None if a row belongs to
    several, or cannot be told. A row has -1 if nothing arrived there, if it is not finite, or if it is so small that all of
    it may be rounding.

    >>> rows, seeds = torch.tensor([3.0, 0.0, 5.0]).view(1, 3, 1), torch.tensor([1.0, 4.0])
    >>> named_records(rows, [torch.tensor([12.0, 0.0, 5.0]).view(1, 3, 1)], [seeds])
    tensor([ 1, -1,  0])
    >>> named_records(rows, [torch.tensor([9.0, 0.0, 5.0]).view(1, 3, 1)], [seeds]) is None
    True
    """
    flat = rows_of(plain).double()
    lengths = torch.linalg.vector_norm(flat, dim=1)  # [n]
    told = lengths.isfinite()
    floor = SILENT * float(lengths[told].max()) if bool(told.any()) else 0.0
    found, wanted = torch.zeros_like(lengths), torch.zeros(len(seeds[0]), dtype=torch.float64, device=plain.device)
    for echo, numbers in zip(seeded, seeds, strict=True):
        ratio = torch.linalg.vector_norm(rows_of(echo).double(), dim=1) / lengths
        exponent = ratio.log2().nan_to_num(nan=-1.0, posinf=-1.0, neginf=-1.0).round().clamp(-1, WIDE)
        found, wanted = found * (WIDE + 2) + exponent + 1, wanted * (WIDE + 2) + numbers.double().log2() + 1
    in_order = wanted.argsort()
    record = in_order[torch.searchsorted(wanted[in_order], found).clamp(max=len(in_order) - 1)]
    pure = wanted[record] == found
    for echo, numbers in zip(seeded, seeds, strict=True):
        times = numbers.double()[record]
        error = torch.linalg.vector_norm(rows_of(echo).double() - flat * times.unsqueeze(1), dim=1)
        pure &= error <= IMPURE * lengths * times
    if bool((told & ~pure & (lengths > floor)).any()):
        return None
    return torch.where(pure & told & (lengths > 0), record, -1)
