"""Normal numbers of a key, written out or added to what is released.

As the numbers themselves (see normals.py) the addition is written down twice: here, and in compiled/noise.c, which does
all of it in one pass through the cache, cipher included. Both give the same bits.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clipless.compiled import COUNT, LIBRARY, POINTER, function, threads
from clipless.noise.drawing import Span, hand_out
from clipless.noise.keystream import SPARE, keystreams
from clipless.noise.normals import CHUNK, Floats, normals

# Numbers drawn from one keystream: blocks are drawn side by side in threads, and are the same whatever their number. So
# many that threads seldom meet, each at the lock of the interpreter.
BLOCK = 2**18

Arrays = Sequence[npt.NDArray[np.floating]]
# Given a key, arrays of one dimension, their standard deviations, and the arrays that the sums go to: the same or others.
Adds = Callable[[bytes, Arrays, Sequence[float], Arrays], None]


def write_noise(key: bytes, into: Arrays) -> None:
    """Standard normal numbers, one after the other through all arrays."""

    def write(span: Span, noise: Floats) -> None:
        into[span.tensor][span.start : span.stop] = noise

    _hand_out(key, into, write)


def add_noise(key: bytes, sums: Arrays, stddevs: Sequence[float], into: Arrays) -> None:
    """Each array plus its standard deviation times the numbers that `write_noise` would write to it.

    >>> sums, noise, out = np.ones(3, np.float32), np.empty(3, np.float32), np.empty(3, np.float32)
    >>> write_noise(bytes(32), [noise])
    >>> add_noise(bytes(32), [sums], [2.0], [out])
    >>> bool((out == 1 + 2 * noise).all())
    True
    """
    fits = all(array.dtype == np.float32 and array.flags.c_contiguous for array in (*sums, *into))
    adds = compiled() if fits else None
    (adds or by_numpy)(key, sums, stddevs, into)


def by_numpy(key: bytes, sums: Arrays, stddevs: Sequence[float], into: Arrays) -> None:
    def write(span: Span, noise: Floats) -> None:
        part = slice(span.start, span.stop)
        noise *= stddevs[span.tensor]
        np.add(sums[span.tensor][part], noise, out=into[span.tensor][part])

    _hand_out(key, into, write)


def _hand_out(key: bytes, arrays: Arrays, write: Callable[[Span, Floats], None]) -> None:
    streams = keystreams(key)

    def drawer() -> Callable[[int, int], Floats]:
        words = np.empty(BLOCK + SPARE // 4, np.uint32)

        def draw(number: int, count: int) -> Floats:
            whole = -(-count // CHUNK) * CHUNK
            streams(number)(words.view(np.uint8), 4 * whole)
            return normals(words[:whole])

        return draw

    hand_out(map(len, arrays), BLOCK, drawer, write)


@functools.cache
def compiled(library: Path = LIBRARY) -> Adds | None:
    """The addition from a compiled library, if there is one, the processor has the cipher, and it does what numpy does."""
    release = function("clipless_release", *[POINTER] * 5, *[COUNT] * 2, POINTER, library=library)
    if release is None:
        return None

    def adds(key: bytes, sums: Arrays, stddevs: Sequence[float], into: Arrays) -> None:
        starts = np.array([0, *itertools.accumulate(map(len, sums))], np.int64)
        scales, done = np.array(stddevs, np.float32), np.zeros(1, np.int64)
        places = (array.ctypes.data for array in (_places(into), _places(sums), scales, starts))
        release(key, *places, len(sums), threads(8 * int(starts[-1])), done.ctypes.data)
        if not done[0]:
            raise NotImplementedError("this processor has no AES of its own")

    try:
        return adds if _agrees(adds) else None
    except NotImplementedError:
        return None


def _places(arrays: Iterable[npt.NDArray[np.floating]]) -> npt.NDArray[np.uint64]:
    """Where they lie in memory."""
    return np.array([array.ctypes.data for array in arrays], np.uint64)


def _agrees(adds: Adds) -> bool:
    """Whether it gives numpy's bits, on arrays of every length beside the borders of chunks and blocks."""
    sizes = (1, 0, CHUNK - 2, 3 * CHUNK, 5, BLOCK - 4 * CHUNK, CHUNK + 7)
    sums = [np.linspace(-3, 3, size, dtype=np.float32) for size in sizes]
    stddevs = [0.1 * (number + 1) for number in range(len(sizes))]
    ours, theirs = ([np.empty_like(array) for array in sums] for _ in range(2))
    for key in (bytes(range(32)), bytes(range(255, 223, -1))):
        adds(key, sums, stddevs, ours)
        by_numpy(key, sums, stddevs, theirs)
        if not all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True)):
            return False
    return True
