"""Sums of independent losses on one grid, by Fourier transform."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import fft

# Chernoff bounds are tried at these many tilts in each direction.
TILTS = 12
STEEPEST = 600.0
MAX_WINDOW = 2**22
# Slightly more than -log of the relative precision of a float.
REACH = 60.0


class RepeatedLoss(NamedTuple):
    """`repeats` independent losses with `masses` on `low`, `low` + 1, … and `infinity` on infinity."""

    low: int
    masses: NDArray[np.float64]
    infinity: float
    repeats: int


class Total(NamedTuple):
    """The distribution of a sum."""

    low: int
    masses: NDArray[np.float64]
    infinity: float


def misplaced(parts: Sequence[RepeatedLoss], *, extended: bool) -> float:
    """How much mass rounding can misplace while the parts are composed; measured, with a factor of 3 in reserve."""
    likely = (float(part.masses.max()) for part in parts)
    total = sum(part.repeats * min(1.0, 2 * (1 - most)) for part, most in zip(parts, likely, strict=True))
    last_digit = float(np.finfo(np.longdouble if extended else np.float64).eps)
    return 4 * last_digit * (total + 100 * min(1.0, total))


def composed(parts: Sequence[RepeatedLoss], tail: float, *, extended: bool = False) -> Total:
    """The sum of all parts inside a window, which the sum leaves with probability at most `tail`.

    Mass outside the window folds back into it and is counted as infinite as well, so masses are never too small.
    dp-accounting does this for one part at a time; all parts together need one window and one inverse transform.

    A loss that is nearly constant has a transform near 1. Its power is computed by log1p and expm1 of the small
    difference from 1, so only that difference is rounded; if `extended`, in numpy's longest floats. Raises OverflowError
    if the window has more than `MAX_WINDOW` points.
    """
    centres = [part.low + int(np.argmax(part.masses)) for part in parts]
    low, high = _window(parts, centres, tail)
    if high - low > MAX_WINDOW:
        raise OverflowError(f"a window of {high - low} points")
    size = fft.next_fast_len(max(high - low + 1, 2), real=True)
    real = np.longdouble if extended else np.float64
    exponent = np.zeros(size // 2 + 1, dtype=np.result_type(real, np.complex64))
    for part, centre in zip(parts, centres, strict=True):
        most = part.masses[centre - part.low]
        rest = np.zeros(size, dtype=real)
        np.add.at(rest, (np.arange(part.low, part.low + len(part.masses)) - centre) % size, part.masses)
        rest[0] = (most - 1) + (rest[0] - most)
        exponent += part.repeats * _log1p(fft.rfft(rest))
    around = fft.irfft(np.expm1(exponent), size)
    around[0] += 1
    masses = np.roll(around, -low)[: high - low + 1].astype(np.float64)
    finite = sum(part.repeats * math.log1p(-part.infinity) for part in parts)
    shift = sum(part.repeats * centre for part, centre in zip(parts, centres, strict=True))
    return Total(low + shift, masses, tail - math.expm1(finite))


def epsilon_at(total: Total, interval: float, delta: float) -> float:
    """The least epsilon at which the losses, multiples of `interval`, exceed it by no more than `delta` allows.

    That is E[(1 − e^(ε − loss))₊] <= delta. Every e^(−loss) is taken relative to the least loss that is exceeded with a
    probability of at most `delta`: epsilon lies less than `REACH` below it, so nothing leaves the range of floats.
    """
    if total.infinity > delta:
        return math.inf
    chances = total.infinity + np.cumsum(total.masses[::-1])
    above = chances > delta
    if not above.any():
        return 0.0
    first = int(np.argmax(above))
    highest = total.low + len(chances) - 1
    bound = (highest - first) * interval
    end = min(len(chances), first + math.ceil(REACH / interval) + 2)
    losses = (highest - np.arange(end)) * interval
    with np.errstate(all="ignore"):
        weighed = np.cumsum(total.masses[::-1][:end] * np.exp(bound - losses))
        found = bound + np.log((chances[first:end] - delta) / weighed[first:])
    reached = np.append(found[:-1] >= losses[first + 1 :], end == len(chances))
    if not reached.any():
        return max(0.0, bound)
    least = float(found[np.argmax(reached)])
    return max(0.0, bound if math.isnan(least) else min(least, bound))


def _log1p(z: NDArray[Any]) -> NDArray[Any]:
    """log(1 + z), exact to the last digits of z where z is small; numpy's own loses them in the real part."""
    x, y = z.real, z.imag
    near = (np.abs(x) < 0.5) & (np.abs(y) < 0.5)
    squared = np.where(near, x * (2 + x) + y * y, 0.0)
    with np.errstate(divide="ignore"):
        real = np.where(near, 0.5 * np.log1p(squared), np.log(np.hypot(1 + x, y)))
    return np.asarray(real + 1j * np.arctan2(y, 1 + x))


def _window(parts: Sequence[RepeatedLoss], centres: Sequence[int], tail: float) -> tuple[int, int]:
    """Where the sum of all distances from the centres lies with probability at least 1 - `tail`, by Chernoff's bound."""
    distances = [np.arange(len(p.masses)) + (p.low - c) for p, c in zip(parts, centres, strict=True)]
    low = sum(part.repeats * int(d[0]) for part, d in zip(parts, distances, strict=True))
    high = sum(part.repeats * int(d[-1]) for part, d in zip(parts, distances, strict=True))
    means = [float(p.masses @ d) for p, d in zip(parts, distances, strict=True)]
    variance = sum(p.repeats * float(p.masses @ (d - m) ** 2) for p, d, m in zip(parts, distances, means, strict=True))
    reach = max(max(-int(d[0]), int(d[-1])) for d in distances)
    spread = math.sqrt(max(variance, 1.0))
    steepest = min(40.0 / spread, STEEPEST / max(reach, 1))
    for tilt in np.geomspace(min(0.5 / spread, 1.0 / max(reach, 1), steepest / 8), steepest, TILTS):
        up = down = math.log(2 / tail)
        for part, distance in zip(parts, distances, strict=True):
            weights = np.exp(tilt * distance)
            up += part.repeats * math.log(part.masses @ weights)
            down += part.repeats * math.log(part.masses @ (1 / weights))
        high, low = min(high, math.ceil(up / tilt)), max(low, math.floor(-down / tilt))
    return min(low, high), max(low, high)
