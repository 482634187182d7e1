"""Noise from a cryptographic generator, released on a grid: for results that are published.

Every call takes a new 256-bit key from the operating system, draws from AES-256 in counter mode under it, and forgets
it. So nothing is kept between calls: copies, pickles, threads and forked processes have no stream to share, a saved
state holds no key, and no keystream is ever used twice. What rounding of floating-point numbers would tell of the true
value is cut off: see docs/noise.md.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipless.errors import InvalidArgument
from clipless.noise.drawing import Span, hand_out
from clipless.noise.keystream import SPARE, Keystream, keystreams, uniform
from clipless.noise.source import released_dtype, released_tensors, stream_number, usable

# Numbers made under one counter range: enough to make the share of Python small, few enough for the cache.
BLOCK = 2**16
Floats = npt.NDArray[np.float64]
_ANGLES = (np.arange(2048, dtype=np.longdouble) + 0.5) * (np.arctan(np.longdouble(1)) / 256)
DIRECTIONS = (np.cos(_ANGLES) + 1j * np.sin(_ANGLES)).astype(np.complex128)
GRID_BITS = 6
# For one pair of normals: 63 and 32 random bits for the radius, 64 for the angle.
PAIR_BYTES = 20


class SecureNoise:
    """AES-256 in counter mode under a key of the operating system, new for every call. It has no seed and no state.

    The step's number decides nothing: asked twice for the same step it gives fresh numbers.
    """

    name = "secure"
    replayable = False
    __slots__ = ()

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None:
            raise InvalidArgument(
                "noise='secure' takes no seed: noise that can be repeated can be subtracted. Leave seed unset, or use "
                "noise='torch' for runs that must repeat."
            )
        _keystreams()

    @property
    def seed(self) -> int | None:
        return None

    @seed.setter
    def seed(self, seed: int | None) -> None:
        SecureNoise(seed)

    def normals(self, stream: str, step: int, templates: Iterable[Tensor]) -> Iterator[Tensor]:
        wanted = list(templates)
        values = [torch.empty(template.shape) for template in wanted]
        flat = [value.view(-1).numpy() for value in values]

        def write(span: Span, noise: Floats) -> None:
            flat[span.tensor][span.start : span.stop] = noise

        hand_out(map(len, flat), BLOCK, _drawer(stream), write)
        return (value.to(template.device) for value, template in zip(values, wanted, strict=True))

    def release(self, stream: str, step: int, values: Sequence[Tensor], stddevs: Sequence[float]) -> Iterator[Tensor]:
        """The noised values, rounded to multiples of `grid(stddev)`: a grid that the values have no part in."""
        outs = released_tensors(values)
        here = [out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype) for out in outs]
        flat = [out.view(-1).numpy() for out in here]
        sums = [value.detach().to("cpu", released_dtype(value)).reshape(-1).numpy() for value in values]
        scales = [(stddev, grid(stddev)) for _, stddev in zip(values, usable(stddevs), strict=True)]

        def write(span: Span, noise: Floats) -> None:
            part = slice(span.start, span.stop)
            stddev, step = scales[span.tensor]
            with np.errstate(all="ignore"):
                noise *= stddev
                noise += sums[span.tensor][part]
                noise *= 1 / step
                np.rint(noise, out=noise)
                np.multiply(noise, step, out=flat[span.tensor][part], casting="same_kind")

        hand_out(map(len, flat), BLOCK, _drawer(stream), write)
        return (out if out is made else out.copy_(made) for out, made in zip(outs, here, strict=True))

    def uniform(self, stream: str, step: int, size: int) -> Tensor:
        stream_number(stream)
        return uniform(_keystreams()(0), size)


def grid(stddev: float) -> float:
    """The step of the grid for noise of that size: a power of two, more than stddev/128 and at most stddev/64.

    Rounding to it is unbiased beside such noise, and makes its standard deviation larger by one part in 100,000.

    >>> grid(1.0), grid(3.0)
    (0.015625, 0.03125)
    """
    return math.ldexp(0.5, math.frexp(stddev)[1] - GRID_BITS)


def _drawer(stream: str) -> Callable[[], Callable[[int, int], Floats]]:
    """Standard normals in float64, from keystreams under one new key."""
    stream_number(stream)
    streams = _keystreams()

    def drawer() -> Callable[[int, int], Floats]:
        make = _Normals()

        def draw(number: int, count: int) -> Floats:
            with np.errstate(divide="raise", invalid="raise"):
                return make(streams(number), count)

        return draw

    return drawer


class _Normals:
    """The Box-Muller transform in float64, in buffers that are used again for every block.

    The radius comes from a uniform number of 95 bits, so it reaches 11.4; with 32 bits it would end at 6.7, with 53 at
    8.6. No number is rejected, so the time taken does not depend on them. All in numpy: torch's own threads, which its
    logarithm and sine use, compute nonsense in a forked child.
    """

    def __init__(self) -> None:
        pairs = BLOCK // 2
        self._bytes = np.empty(PAIR_BYTES * pairs + SPARE, np.uint8)
        self._radius, self._angle, self._square, self._other = np.empty((4, pairs))
        self._turned = np.empty(pairs, np.complex128)

    def __call__(self, keystream: Keystream, count: int) -> Floats:
        pairs = (count + 1) // 2
        keystream(self._bytes, PAIR_BYTES * pairs)
        coarse, turn = self._bytes[: 16 * pairs].view(np.int64).reshape(2, pairs)
        fine = self._bytes[16 * pairs : PAIR_BYTES * pairs].view(np.uint32)
        radius, angle, square, other = (a[:pairs] for a in (self._radius, self._angle, self._square, self._other))
        turned = self._turned[:pairs]

        # A uniform number from 2**-95 to 1: 63 bits, and 32 more with the last one set, so that it is never 0.
        coarse &= 2**63 - 1
        fine |= 1
        np.multiply(coarse, 2.0**-63, out=radius)
        np.multiply(fine, 2.0**-95, out=other)
        radius += other
        np.log(radius, out=radius)
        radius *= -2
        np.sqrt(radius, out=radius)
        # Eleven bits choose one of the directions, the others turn by an angle so small that two terms are exact.
        directions = DIRECTIONS[turn >> 53]
        turn <<= 11
        np.multiply(turn, math.pi / len(DIRECTIONS) * 2.0**-63, out=angle)
        np.multiply(angle, angle, out=square)
        np.multiply(square, 1 / 24, out=other)
        other -= 0.5
        other *= square
        other += 1
        np.multiply(other, radius, out=turned.real)
        np.multiply(square, -1 / 6, out=other)
        other += 1
        other *= angle
        np.multiply(other, radius, out=turned.imag)
        turned *= directions
        return turned.view(np.float64)[:count]


def _keystreams() -> Callable[[int], Keystream]:
    """Keystreams under one new key, by number."""
    return keystreams(os.urandom(32))
