"""Noise added to a sum, rounded to a grid, and divided: what is released of the sum.

Like the numbers themselves (see normals.py) this is implemented twice: here, and in native/noise.c, which does all of it in
one pass through the cache, cipher included. Both give the same bits.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clipless.arrays import Floats
from clipless.native import checked
from clipless.native.noise import Noise, build
from clipless.noise.normals import CHUNK, Chunks, blocks, chunks_by_numpy

GRID_BITS = 6


def grid(stddev: float) -> float:
    """The step of the grid for noise of that size: a power of two, more than stddev/128 and at most stddev/64.

    With such noise, rounding to it is unbiased and increases the standard deviation by one part in 100,000.

    >>> grid(1.0), grid(3.0)
    (0.015625, 0.03125)
    """
    return math.ldexp(0.5, math.frexp(stddev)[1] - GRID_BITS)


def by_numpy(
    key: bytearray,
    sums: Sequence[Tensor],
    stddevs: Sequence[float],
    weight: float,
    into: Sequence[Tensor],
    places: Sequence[int] | None = None,
    chunks: Chunks = chunks_by_numpy,
) -> None:
    """into[k] = sums[k] + stddevs[k] times the numbers of the key from number places[k] on, by default tensor after tensor,
    rounded to the grid of stddevs[k], then times `weight`.

    Contiguous tensors in main memory; each sum in a type at least as fine as what it goes to. `chunks` makes the numbers.
    Torch is not used, because its threads give wrong results in a forked child.
    """
    noise, left = blocks(key, sum(tensor.numel() for tensor in into), made=chunks), np.empty(0)
    for number, (value, stddev, out) in enumerate(zip(sums, stddevs, into, strict=True)):
        if places is not None:
            noise, left = blocks(key, out.numel(), places[number], chunks), np.empty(0)
        given, made, far = value.numpy().reshape(-1), out.numpy().reshape(-1), 1.5 * 2.0**52 * grid(stddev)
        done = 0
        while done < len(made):
            if not len(left):
                left = next(noise)
            part, left = np.split(left, [len(made) - done])
            place = slice(done, done + len(part))
            with np.errstate(all="ignore"):
                part *= stddev
                part += given[place]
                # Near 1.5 * 2**52 steps floating-point numbers are one step apart.
                part += far
                part -= far
                part *= weight
                made[place] = part
            done += len(part)
            part[:] = 0


def _build(library: Path) -> Noise | None:
    """Checked with both forms of the cipher, as which one is taken depends on the processor."""
    narrow, wide = build(library, narrow=True), build(library)
    if narrow is None or wide is None or not all(np.array_equal(*pair) for pair in _pairs(narrow)):
        return None
    return wide


def _pairs(ours: Noise) -> Iterator[tuple[Tensor, Tensor]]:
    """The numbers of two keys, and sums with tensors of every length beside the borders of chunks, end to end and apart."""
    sizes = (1, 0, CHUNK - 2, 3 * CHUNK, 5, 40 * CHUNK, CHUNK + 7)
    types = (np.float32, np.float64)  # in turn
    sums = [torch.from_numpy(np.linspace(-3, 3, size, dtype=types[k % 2])) for k, size in enumerate(sizes)]
    stddevs = [0.1 * 1.9**number for number in range(len(sizes))]
    for key in (bytearray(range(32)), bytearray(range(255, 223, -1))):
        for first in (0, 7):
            numbers = torch.from_numpy(np.zeros(20 * CHUNK))
            ours.normals(key, numbers, first)
            yield numbers, torch.from_numpy(chunks_by_numpy(key, first, 20))
        made, expected = ([torch.from_numpy(np.zeros(size, np.float32)) for size in sizes] for _ in range(2))
        ours.add(key, sums, stddevs, 1 / 3, made, None)
        by_numpy(key, sums, stddevs, 1 / 3, expected)
        yield from zip(made, expected, strict=True)
        places = [start + number * (CHUNK + 300) for number, start in enumerate(accumulate(sizes, initial=5))][:-1]
        ours.add(key, sums, stddevs, 1 / 7, made, places)
        by_numpy(key, sums, stddevs, 1 / 7, expected, places)
        yield from zip(made, expected, strict=True)


compiled = checked(_build, _pairs)


def chunks_by(fast: Noise | None) -> Chunks:
    """What makes the numbers of sums that the compiled release does not take: the library's numbers, or numpy's."""
    if fast is None:
        return chunks_by_numpy

    def made(key: bytearray, first: int, chunks: int) -> Floats:
        numbers = np.empty(chunks * CHUNK)
        fast.normals(key, torch.from_numpy(numbers), first)
        return numbers

    return made
