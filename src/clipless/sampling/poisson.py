"""Which records are in a Poisson batch: each independently with the same probability, in time that grows with the batch and
not with the data set.

What is drawn is the gap between chosen records. The number of records skipped before the next chosen one is geometric:
floor(log U / log(1 - rate)) with U uniform on (0, 1). U is a real number of which 64 bits are drawn first. If these bits and
the rounding of the logarithms leave the integer undecided, more bits are drawn and the logarithms are computed to as many
digits as needed. So the distribution is exact, and the result depends on the key alone, not on a machine's logarithm.
"""

import decimal
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipless.noise.keys import keystream, words

# No float64 logarithm that numpy uses is off by more than a few units in the last place; this is 16 of them.
_ROUNDING = 2.0**-48
# Gaps drawn at a time, at most.
_MOST = 2**16
Numbers = npt.NDArray[np.int64]


def poisson_sample(key: bytes | bytearray, size: int, rate: float) -> Tensor:
    """The records drawn from 0, ..., size - 1, in order.

    >>> poisson_sample(bytes(32), 4, 1.0)
    tensor([0, 1, 2, 3])
    """
    if rate >= 1:
        return torch.arange(size)
    expected = rate * size
    count = min(_MOST, 2 * math.ceil(expected / 2 + 3 * math.sqrt(expected) + 4))
    found: list[Numbers] = []
    last = -1
    while last < size:
        chosen = _gaps(key, count * len(found), count, size, rate) + 1
        chosen[0] += last
        chosen.cumsum(out=chosen)
        found.append(chosen)
        last = int(chosen[-1])
    chosen = found[0] if len(found) == 1 else np.concatenate(found)
    return torch.from_numpy(chosen[: int(chosen.searchsorted(size))])


def _gaps(key: bytes | bytearray, first: int, count: int, most: int, rate: float) -> Numbers:
    """The gaps of these numbers, each at most `most`. `first` and `count` are even: a block of the cipher has two words."""
    bits = words(key, first // 2, count)
    # U is between bits/2**64 and (bits + 1)/2**64, and float64 has 53 of its digits.
    u = (bits + 0.5) * 2.0**-64
    per_log = 1 / math.log1p(-rate)
    gaps = np.log(u) * per_log
    # The largest error of the product: rounding, and the digits of U that are not drawn yet or were rounded, which change
    # log U by less than 2**-63 / U and 2**-51.
    least = float(u.min())
    error = float(gaps.max()) * _ROUNDING + (2.0**-62 / least + 2.0**-51) * -per_log
    low = np.floor(gaps - error)
    whole = np.minimum(low, most).astype(np.int64)
    unclear = low != np.floor(gaps + error)
    if least < 2.0**-64:
        unclear |= bits == 0
    if unclear.any():
        for number in np.flatnonzero(unclear & (low < most)).tolist():
            whole[number] = min(most, _exact_gap(key, first + number, int(bits[number]), rate))
    return whole


def _exact_gap(key: bytes | bytearray, number: int, bits: int, rate: float) -> int:
    """floor(log U / log(1 - rate)) for the U that begins with these 64 bits; the next ones are from a separate keystream."""
    known = 64
    while True:
        more = keystream(key, ((number + 1) << 64) + known // 128, 16)
        bits, known = bits << 128 | int.from_bytes(more), known + 128
        with decimal.localcontext(decimal.Context(prec=known, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)):
            scale, base = decimal.Decimal(2) ** known, (1 - decimal.Decimal(rate)).ln()
            slack = decimal.Decimal(10) ** (8 - known // 4)
            ends = ((decimal.Decimal(bits + end) / scale).ln() / base for end in (1, 0) if bits + end)
            gaps = {math.floor(gap + error) for gap in ends for error in (-slack, slack)}
        if len(gaps) == 1 and bits:
            return gaps.pop()
