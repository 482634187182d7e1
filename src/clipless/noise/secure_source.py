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
from clipless.noise.source import Span, blocks, released_dtype, released_into, stream_number, usable
from clipless.noise.threads import share

# Numbers made under one counter range: enough to make the share of Python small, few enough for the cache.
BLOCK = 2**16
Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Keystream = Callable[[Bytes, int], None]
_ANGLES = (np.arange(2048, dtype=np.longdouble) + 0.5) * (np.arctan(np.longdouble(1)) / 256)
DIRECTIONS = (np.cos(_ANGLES) + 1j * np.sin(_ANGLES)).astype(np.complex128)
GRID_BITS = 6
# For one pair of normals: 63 and 32 random bits for the radius, 64 for the angle.
PAIR_BYTES = 20
_ZEROS = memoryview(bytes(PAIR_BYTES * BLOCK // 2))


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

        _draw(stream, map(len, flat), write)
        return (value.to(template.device) for value, template in zip(values, wanted, strict=True))

    def release(
        self,
        stream: str,
        step: int,
        values: Sequence[Tensor],
        stddevs: Sequence[float],
        into: Sequence[Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """The noised values, rounded to multiples of `grid(stddev)`: a grid that the values have no part in."""
        outs = released_into(values, into)
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

        _draw(stream, map(len, flat), write)
        return (out if out is made else out.copy_(made) for out, made in zip(outs, here, strict=True))

    def uniform(self, stream: str, step: int, size: int) -> Tensor:
        stream_number(stream)
        keystream = _keystreams()(0)
        words = np.empty(BLOCK + 2, np.uint64)
        values = np.empty(size)
        for start in range(0, size, BLOCK):
            part = values[start : start + BLOCK]
            keystream(words.view(np.uint8), 8 * len(part))
            np.multiply(words[: len(part)] >> np.uint64(11), 2.0**-53, out=part)
        return torch.from_numpy(values)


def grid(stddev: float) -> float:
    """The step of the grid for noise of that size: a power of two, more than stddev/128 and at most stddev/64.

    Rounding to it is unbiased beside such noise, and makes its standard deviation larger by one part in 100,000.

    >>> grid(1.0), grid(3.0)
    (0.015625, 0.03125)
    """
    return math.ldexp(0.5, math.frexp(stddev)[1] - GRID_BITS)


def _draw(stream: str, sizes: Iterable[int], write: Callable[[Span, Floats], None]) -> None:
    """Hand float64 normals, span by span, to `write`, which may overwrite them; from several threads at once."""
    stream_number(stream)
    keystreams = _keystreams()

    def work(numbered: Iterator[tuple[int, list[Span]]]) -> None:
        draw = _Normals()
        for number, block in numbered:
            with np.errstate(divide="raise", invalid="raise"):
                noise = draw(keystreams(number), sum(stop - start for _, start, stop in block))
            done = 0
            for span in block:
                count = span.stop - span.start
                write(span, noise[done : done + count])
                done += count

    share(list(enumerate(blocks(sizes, BLOCK))), work)


class _Normals:
    """The Box-Muller transform in float64, in buffers that are used again for every block.

    The radius comes from a uniform number of 95 bits, so it reaches 11.4; with 32 bits it would end at 6.7, with 53 at
    8.6. No number is rejected, so the time taken does not depend on them. All in numpy: torch's own threads, which its
    logarithm and sine use, compute nonsense in a forked child.
    """

    def __init__(self) -> None:
        pairs = BLOCK // 2
        self._bytes = np.empty(PAIR_BYTES * pairs + 16, np.uint8)
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
    """Keystreams under one new key, by number; each writes its next bytes into a buffer that has 16 to spare."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import CTR
    except ImportError as missing:
        raise InvalidArgument(
            "noise='secure' needs the package cryptography, which cannot be imported: pip install cryptography, or use "
            "noise='torch'."
        ) from missing
    key = AES(os.urandom(32))

    def keystream(number: int) -> Keystream:
        cipher = Cipher(key, CTR(number.to_bytes(8) + bytes(8))).encryptor()

        def write(buffer: Bytes, count: int) -> None:
            cipher.update_into(_ZEROS[:count], buffer.data)

        return write

    return keystream
