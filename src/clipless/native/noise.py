"""noise.c: normal noise of a key, added to tensors and rounded to a grid."""

import ctypes
import itertools
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from clipless.native.library import COUNT, POINTER, WORTH_A_THREAD, function, threads

KEY_MEMORY = ctypes.c_char * 32


class Noise(NamedTuple):
    """`add` takes a key, sums in float32 or float64, their standard deviations, a weight, and the tensors that the results
    go to, float32, all contiguous in main memory; then the place of each in the stream of numbers, ascending, or None if
    they lie end to end.
    `normals` writes the numbers of a key, from chunk `first` on, to a float64 tensor of whole chunks."""

    add: Callable[[bytearray, Sequence[Tensor], Sequence[float], float, Sequence[Tensor], Sequence[int] | None], None]
    normals: Callable[[bytearray, Tensor, int], None]


# From a key and the number of the first block of 16 bytes to as many blocks as the memory has room for, in place.
Keystream = Callable[[bytearray, int, bytearray], None]


def build_keystream(library: Path) -> Keystream | None:
    """It does nothing on a processor without AES, as `checked` finds out."""
    run = function(library, "clipless_keystream", POINTER, COUNT, COUNT, POINTER, COUNT)
    if run is None:
        return None

    def write(key: bytearray, counter: int, into: bytearray) -> None:
        size = len(into)
        place = (ctypes.c_char * size).from_buffer(into)
        run(KEY_MEMORY.from_buffer(key), counter >> 64, counter & (2**64 - 1), place, size // 16)

    return write


def build(library: Path, chunk: int = 1024, narrow: bool = False) -> Noise | None:
    """It does nothing on a processor without AES, as `checked` finds out. `narrow` does without the processor's instructions
    for four blocks of the cipher at a time."""
    release = function(library, "clipless_release", *[POINTER] * 5, ctypes.c_double, POINTER, *[COUNT] * 3)
    numbers = function(library, "clipless_normals", *[POINTER] * 2, *[COUNT] * 3)
    if release is None or numbers is None:
        return None

    def add(
        key: bytearray,
        sums: Sequence[Tensor],
        stddevs: Sequence[float],
        weight: float,
        into: Sequence[Tensor],
        places: Sequence[int] | None = None,
    ) -> None:
        sizes = list(map(Tensor.numel, into))
        exact = [value.dtype is torch.float64 for value in sums]
        each = [*map(Tensor.data_ptr, into), *map(Tensor.data_ptr, sums), *exact]
        work = 8 * sum(sizes)
        if places is not None:
            each, stddevs, sizes = _with_gaps(each, stddevs, sizes, places)
        count, workers = len(sizes), 1 if work < WORTH_A_THREAD else threads(work)
        words, scales = array("q", [*each, 0, *itertools.accumulate(sizes)]), array("d", stddevs)
        at, size = words.buffer_info()[0], count * words.itemsize
        memory = KEY_MEMORY.from_buffer(key)
        given = (at, at + size, at + 2 * size, scales.buffer_info()[0])
        release(memory, *given, weight, at + 3 * size, count, narrow, workers)

    def normals(key: bytearray, into: Tensor, first: int) -> None:
        numbers(KEY_MEMORY.from_buffer(key), into.data_ptr(), first, len(into) // chunk, narrow)

    return Noise(add, normals)


def _with_gaps(
    each: list[int], stddevs: Sequence[float], sizes: list[int], places: Sequence[int]
) -> tuple[list[int], list[float], list[int]]:
    """The same with a null tensor for what lies before each."""
    ends = [0, *(place + size for place, size in zip(places, sizes, strict=True))]
    gaps = [place - end for place, end in zip(places, ends, strict=False)]
    with_nulls = [word for own in each for word in (0, own)]
    scales = [scale for stddev in stddevs for scale in (1.0, stddev)]
    return with_nulls, scales, [part for pair in zip(gaps, sizes, strict=True) for part in pair]
