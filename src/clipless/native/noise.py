"""noise.c: normal noise of a key, added to tensors and rounded to a grid."""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from clipless.native.library import COUNT, POINTER, WORTH_A_THREAD, function, threads


class Noise(NamedTuple):
    """`add` takes a key, sums, their standard deviations, a weight, and the tensors that the results go to: float32, without
    gaps, in main memory. `normals` writes the numbers of a key to a float64 tensor of whole chunks, for the self-check."""

    add: Callable[[bytearray, Sequence[Tensor], Sequence[float], float, Sequence[Tensor]], None]
    normals: Callable[[bytearray, Tensor], None]


# From a key and the number of the first block of 16 bytes to as many blocks as the memory has room for, in place.
Keystream = Callable[[bytearray, int, bytearray], None]


def build_keystream(library: Path) -> Keystream | None:
    """It does nothing on a processor without AES, as `checked` finds out."""
    run = function(library, "clipless_keystream", POINTER, COUNT, COUNT, POINTER, COUNT)
    if run is None:
        return None

    def write(key: bytearray, counter: int, into: bytearray) -> None:
        places = [(ctypes.c_char * len(memory)).from_buffer(memory) for memory in (key, into)]
        run(places[0], counter >> 64, counter & (2**64 - 1), places[1], len(into) // 16)

    return write


def build(library: Path, chunk: int = 1024, narrow: bool = False) -> Noise | None:
    """It does nothing on a processor without AES, as `checked` finds out. `narrow` does without the processor's instructions
    for four blocks of the cipher at a time."""
    release = function(library, "clipless_release", *[POINTER] * 4, ctypes.c_double, POINTER, *[COUNT] * 3)
    numbers = function(library, "clipless_normals", *[POINTER] * 2, *[COUNT] * 2)
    if release is None or numbers is None:
        return None

    def add(
        key: bytearray, sums: Sequence[Tensor], stddevs: Sequence[float], weight: float, into: Sequence[Tensor]
    ) -> None:
        count = len(sums)
        starts = (COUNT * (count + 1))(0, *itertools.accumulate(map(Tensor.numel, into)))
        places = [(POINTER * count)(*map(Tensor.data_ptr, tensors)) for tensors in (into, sums)]
        work = 8 * starts[count]
        workers = 1 if work < WORTH_A_THREAD else threads(work)
        key_place = (ctypes.c_char * 32).from_buffer(key)
        release(key_place, *places, (ctypes.c_double * count)(*stddevs), weight, starts, count, narrow, workers)

    def normals(key: bytearray, into: Tensor) -> None:
        numbers((ctypes.c_char * 32).from_buffer(key), into.data_ptr(), len(into) // chunk, narrow)

    return Noise(add, normals)
