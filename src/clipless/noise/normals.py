"""Random words to standard normal numbers, in float32: the same numbers, bit for bit, on every machine.

Box-Muller with polynomials for logarithm, sine and cosine, so that each step is an addition, a multiplication or a square
root of float32, which all processors round alike. It is written down twice: here for numpy, and in compiled/normals.c, which
does in one pass through the cache what takes fifty here. Where the package was built without a C compiler, or what it
built does not agree, numpy does the work.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clipless.compiled import COUNT, LIBRARY, POINTER, function

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
# Words that are turned into numbers together: the first half gives radii, the second angles.
CHUNK = 1024

# log(1 + f) = f + f**2 times this, from the highest power, where 1 + f is between the roots of 1/2 and of 2.
_LOG = (
    -0.08101558685302734, 0.12712307274341583, -0.12972238659858704, 0.14202174544334412, -0.16642247140407562,
    0.20001468062400818, -0.25000298023223877, 0.333333283662796, -0.5,
)  # fmt: skip
# In the square of an angle up to an eighth of the circle: sin a = a + a**3 times this; cos a is the other.
_SINE = (-0.00019587950373534113, 0.008332748897373676, -0.166666641831398)
_COSINE = (2.454804962326307e-05, -0.001388830365613103, 0.0416666641831398, -0.5, 1.0)
_LOG_OF_2 = 0.6931471824645996
_TURN = 3.65729529994141e-10
_ROOT_HALF = 0x3F3504F3


def normals(words: Words) -> Floats:
    """An even number of random words, overwritten with as many standard normal numbers.

    The radius comes from 31 bits and ends at 6.66; a true Gaussian passes that once in 4e10 numbers. For noise that is
    to hide something, see the secure source, which ends at 11.4.
    """
    (compiled() or arithmetic)(words)
    return words.view(np.float32)


def arithmetic(words: Words) -> None:
    """The transform in numpy; normals.c follows it line by line."""
    first, second = words.reshape(-1, 2, CHUNK // 2).transpose(1, 0, 2)

    # The radius: sqrt(-2 log u) with u from 2**-32 to 1, as u = (1 + f) 2**k with 1 + f close to 1.
    u = (first >> np.uint32(1)).view(np.int32).astype(np.float32)
    u += 0.5
    u *= 2.0**-31
    k = (u.view(np.int32) - np.int32(_ROOT_HALF)) >> 23
    f = (u.view(np.int32) - (k << 23)).view(np.float32) - np.float32(1)
    log = polynomial(_LOG, f)
    log *= f * f
    log += f
    log += k.astype(np.float32) * np.float32(_LOG_OF_2)
    log *= -2
    radius = np.sqrt(log, out=log)

    # The angle: thirty bits turn by at most an eighth of the circle, two more choose the quarter.
    angle = (second << np.uint32(2)).view(np.int32).astype(np.float32)
    angle *= _TURN
    square = angle * angle
    sine = polynomial(_SINE, square)
    sine *= square * angle
    sine += angle
    cosine = polynomial(_COSINE, square)

    cosine *= radius
    sine *= radius
    x, y = cosine.view(np.uint32), sine.view(np.uint32)
    swapped = (x ^ y) & -(second >> np.uint32(31))
    sign = (second << np.uint32(1)) & np.uint32(2**31)
    np.bitwise_xor(x ^ swapped, sign, out=first)
    np.bitwise_xor(y ^ swapped ^ sign, second & np.uint32(2**31), out=second)


def polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    """By Horner's rule, from the highest power.

    >>> polynomial((2.0, 0.0, 1.0), np.array([3.0], np.float32)).tolist()
    [19.0]
    """
    highest, *others = coefficients
    value = np.full_like(x, highest)
    for coefficient in others:
        value *= x
        value += np.float32(coefficient)
    return value


@functools.cache
def compiled(library: Path = LIBRARY) -> Callable[[Words], None] | None:
    """The transform from a compiled library, if there is one and it does what numpy does; else None."""
    in_one_pass = function("clipless_normals", POINTER, COUNT, library=library)
    if in_one_pass is None:
        return None

    def transform(words: Words) -> None:
        in_one_pass(words.reshape(-1, CHUNK).ctypes.data, len(words))

    return transform if _agrees(transform) else None


def _agrees(transform: Callable[[Words], None]) -> bool:
    """Whether it gives numpy's numbers for words spread over all fractions and quarters, every other cut to any length."""
    count = np.arange(32 * CHUNK, dtype=np.uint32)
    radii = (count * np.uint32(0x9E3779B1)) >> (count % 2 * (count // 2 % 32))
    angles = count * np.uint32(0x85EBCA77)
    expected = np.stack([radii.reshape(-1, CHUNK // 2), angles.reshape(-1, CHUNK // 2)], axis=1).reshape(-1)
    found = expected.copy()
    arithmetic(expected)
    transform(found)
    return np.array_equal(expected, found)
