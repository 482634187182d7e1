"""Normal numbers of a key, written out or added to what is released.

As the numbers themselves (see normals.py) the addition is written down twice: here, and in compiled/noise.c, which does
all of it in one pass through the cache, cipher included. Both give the same bits.
"""

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clipless.compiled import COUNT, LIBRARY, POINTER, function, threads
from clipless.noise.drawing import Span, hand_out
from clipless.noise.keystream import SPARE, keystreams
from clipless.noise.normals import CHUNK, Floats, normals

# Numbers drawn from one keystream: blocks are drawn side by side in threads, and are the same whatever their number. So
# many that threads seldom meet, each at the lock of the interpreter.
BLOCK = 2**18

# All tensors here have one dimension and lie in main memory.
Lines = Sequence[Tensor]
# Given a key, tensors, their standard deviations, and the tensors that the sums go to: the same or others.
Adds = Callable[[bytes, Lines, Sequence[float], Lines], None]


def write_noise(key: bytes, into: Lines) -> None:
    """Standard normal numbers, one after the other through all tensors."""
    arrays = [line.numpy() for line in into]

    def write(span: Span, noise: Floats) -> None:
        arrays[span.tensor][span.start : span.stop] = noise

    _hand_out(key, into, write)


def add_noise(key: bytes, sums: Lines, stddevs: Sequence[float], into: Lines) -> None:
    """Each tensor plus its standard deviation times the numbers that `write_noise` would write to it.

    >>> sums, noise, out = torch.ones(3), torch.empty(3), torch.empty(3)
    >>> write_noise(bytes(32), [noise])
    >>> add_noise(bytes(32), [sums], [2.0], [out])
    >>> torch.equal(out, 1 + 2 * noise)
    True
    """
    fits = all(line.dtype is torch.float32 and line.is_contiguous() for line in (*sums, *into))
    fits = fits and all(len(one) == len(other) for one, other in zip(sums, into, strict=True))
    adds = compiled() if fits else None
    (adds or by_numpy)(key, sums, stddevs, into)


def by_numpy(key: bytes, sums: Lines, stddevs: Sequence[float], into: Lines) -> None:
    """Without any thread of torch's, which compute nonsense in a forked child."""
    ins, outs = ([line.numpy() for line in lines] for lines in (sums, into))

    def write(span: Span, noise: Floats) -> None:
        part = slice(span.start, span.stop)
        noise *= stddevs[span.tensor]
        np.add(ins[span.tensor][part], noise, out=outs[span.tensor][part])

    _hand_out(key, into, write)


def _hand_out(key: bytes, lines: Lines, write: Callable[[Span, Floats], None]) -> None:
    streams = keystreams(key)

    def drawer() -> Callable[[int, int], Floats]:
        words = np.empty(BLOCK + SPARE // 4, np.uint32)

        def draw(number: int, count: int) -> Floats:
            whole = -(-count // CHUNK) * CHUNK
            streams(number)(words.view(np.uint8), 4 * whole)
            return normals(words[:whole])

        return draw

    hand_out(map(len, lines), BLOCK, drawer, write)


@functools.cache
def compiled(library: Path = LIBRARY) -> Adds | None:
    """The addition from a compiled library, if there is one and it does what numpy does; without a cipher in the processor
    it does nothing."""
    release = function("clipless_release", *[POINTER] * 5, *[COUNT] * 2, library=library)
    if release is None:
        return None

    def adds(key: bytes, sums: Lines, stddevs: Sequence[float], into: Lines) -> None:
        assert len(key) == 32
        tensors = len(sums)
        starts = [0, *itertools.accumulate(map(len, sums))]
        places = [(POINTER * tensors)(*[line.data_ptr() for line in lines]) for lines in (into, sums)]
        scales = (ctypes.c_float * tensors)(*map(float, stddevs))
        release(key, *places, scales, (COUNT * len(starts))(*starts), tensors, threads(8 * starts[-1]))

    return adds if _agrees(adds) else None


def _agrees(adds: Adds) -> bool:
    """Whether it gives numpy's bits, on tensors of every length beside the borders of chunks and blocks. It may be asked
    in a forked child, where torch must not compute."""
    sizes = (1, 0, CHUNK - 2, 3 * CHUNK, 5, BLOCK - 4 * CHUNK, CHUNK + 7)
    sums = [torch.from_numpy(np.linspace(-3, 3, size, dtype=np.float32)) for size in sizes]
    stddevs = [0.1 * (number + 1) for number in range(len(sizes))]
    ours, theirs = ([torch.from_numpy(np.zeros(size, np.float32)) for size in sizes] for _ in range(2))
    for key in (bytes(range(32)), bytes(range(255, 223, -1))):
        adds(key, sums, stddevs, ours)
        by_numpy(key, sums, stddevs, theirs)
        if not all(np.array_equal(one.numpy(), other.numpy()) for one, other in zip(ours, theirs, strict=True)):
            return False
    return True
