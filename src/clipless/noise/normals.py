"""Random bits to standard normal numbers in float64: the same numbers, bit for bit, on every machine.

Box-Muller with polynomials for logarithm, sine and cosine, so that each step is an addition, a multiplication, a division or
a square root, which all processors round in the same way. It is implemented twice: here for numpy, and in native/noise.c,
which does in one pass through the cache what takes sixty here.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from clipless.arrays import Floats
from clipless.noise.keys import words

Words = npt.NDArray[np.uint64]
# From a key, the first chunk and how many to their numbers.
Chunks = Callable[[bytearray, int, int], Floats]
# Numbers made together: number i and number PAIRS + i are the coordinates of one point.
PAIRS = 512
CHUNK = 2 * PAIRS
# Blocks of the cipher that a chunk takes: two words of 64 bits for a pair.
CHUNK_BLOCKS = PAIRS
# Chunks that numpy makes at a time: few enough for the cache.
_TOGETHER = 64

# -2 log((1 + s) / (1 - s)) = s times this in s**2, from the highest power, for (1 + s) / (1 - s) between the roots of 1/2
# and of 2.
_LOG = (
    -0.332438941803548, -0.36280370404986495, -0.44445724953699084, -0.571428482730327, -0.800000000224244,
    -1.3333333333332416, -4.0,
)  # fmt: skip
# In the square of t from 0 to 1: sin(t pi/4) is t times this; cos(t pi/4) is the other.
_SINE = (
    6.877360573166326e-12, -1.7571500746983935e-09, 3.133616225433416e-07, -3.657620415891387e-05,
    0.002490394570188844, -0.08074551218828054, 0.7853981633974483,
)  # fmt: skip
_COSINE = (
    1.1384778780982284e-10, -2.461006226754435e-08, 3.5908597712602535e-06, -0.00032599188676870125,
    0.0158543442438019, -0.30842513753404227, 1.0,
)  # fmt: skip
_TWICE_LOG_OF_2 = -1.3862943611198906
_ROOT_HALF = 0x3FE6A09E667F3BCD
_ONE = 0x3FF0000000000000


def standard_normals(key: bytearray, count: int) -> Floats:
    """The first `count` numbers under a key: those that a release with this key adds, over all its tensors end to end.

    >>> bool((standard_normals(bytearray(32), 3) == standard_normals(bytearray(32), 2000)[:3]).all())
    True
    """
    return np.concatenate([np.empty(0), *blocks(key, count)])


def chunks_by_numpy(key: bytearray, first: int, chunks: int) -> Floats:
    """The numbers of whole chunks, from the first one on."""
    bits = words(key, first * CHUNK_BLOCKS, chunks * CHUNK)
    numbers = box_muller(bits)
    bits[:] = 0
    return numbers


def blocks(key: bytearray, count: int, place: int = 0, made: Chunks = chunks_by_numpy) -> Iterator[Floats]:
    """The same, block by block, from number `place` on. A block may be overwritten.

    >>> bool((next(blocks(bytearray(32), 3, 1500)) == standard_normals(bytearray(32), 1503)[1500:]).all())
    True
    """
    skipped, start = place % CHUNK, place // CHUNK
    for first in range(0, skipped + count, _TOGETHER * CHUNK):
        chunks = min(_TOGETHER, -(-(skipped + count - first) // CHUNK))
        yield made(key, start + first // CHUNK, chunks)[max(skipped - first, 0) : skipped + count - first]


def box_muller(bits: Words) -> Floats:
    """As many normal numbers as random words, which are a multiple of CHUNK.

    The radius comes from a uniform number of 87 bits, so it reaches 11.04; with 32 bits it would end at 6.7, with 53 at 8.6.
    No number is rejected, so the time taken does not depend on them.
    """
    first, second = bits.reshape(-1, 2, PAIRS).transpose(1, 0, 2)

    # The squared radius: -2 log u with u from 2**-88 to 1, as u = (1 + f) 2**k with 1 + f close to 1. The 52 upper bits of
    # u are in the first word, 12 more below them, and 24 in the second word, with the last one set.
    high = (first >> np.uint64(12)) | np.uint64(_ONE)
    low = (first << np.uint64(40)) & np.uint64(0x000FFF0000000000)
    low |= (second << np.uint64(13)) & np.uint64(0x000000FFFFFF0000)
    low |= np.uint64(0x3CB0000000010000)
    u = ((high.view(np.float64) - (1 + 2.0**-52)) + low.view(np.float64)).view(np.uint64)
    scale = (u + np.uint64(_ONE - _ROOT_HALF)) >> np.uint64(52)
    k = (scale | np.uint64(0x4330000000000000)).view(np.float64) - (2.0**52 + 1023)
    f = (u - (scale << np.uint64(52)) + np.uint64(_ONE)).view(np.float64) - 1
    s = f / (f + 2)
    squared = polynomial(_LOG, s * s)
    squared *= s
    squared += k * _TWICE_LOG_OF_2
    radius = np.sqrt(squared)

    # The angle: 37 bits for a place within an eighth of the circle, three more for the eighth.
    within = ((second >> np.uint64(12)) & np.uint64(0x000FFFFFFFFF8000)) | np.uint64(0x3FF0000000004000)
    t = within.view(np.float64) - 1
    q = t * t
    sine = polynomial(_SINE, q)
    sine *= t
    cosine = polynomial(_COSINE, q)
    x, y = cosine * radius, sine * radius
    swapped = (second & np.uint64(4)) != 0
    numbers = np.stack([np.where(swapped, y, x), np.where(swapped, x, y)], axis=1).view(np.uint64)
    numbers[:, 0] ^= second << np.uint64(63)
    numbers[:, 1] ^= (second << np.uint64(62)) & np.uint64(2**63)
    return numbers.view(np.float64).reshape(-1)


def polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    """By Horner's rule, from the highest power.

    >>> polynomial((2.0, 0.0, 1.0), np.array([3.0])).tolist()
    [19.0]
    """
    highest, *others = coefficients
    value = np.full_like(x, highest)
    for coefficient in others:
        value *= x
        value += coefficient
    return value
