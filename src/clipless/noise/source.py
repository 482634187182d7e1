"""What a noise source promises, and what is checked before it draws."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from clipless.errors import InvalidArgument, named

STREAMS = {"gradient": 1, "statistic": 2, "sample": 3}


class NoiseSource(Protocol):
    """Draws for the numbered steps of one run.

    A replayable source is a pure function of its seed, the stream and the step: asked again, it gives the same numbers.
    One that is not has no seed (None) and gives fresh numbers at every call, so a step that is taken again after an
    interruption is a further release.
    """

    name: str
    replayable: bool
    seed: int | None

    def normals(self, stream: str, step: int, templates: Iterable[Tensor]) -> Iterator[Tensor]:
        """Standard normal float32 tensors, shaped and placed like the templates, independent of every other stream and
        step. To publish a value use `release`, which also guards its last bits where the source promises that."""

    def release(self, stream: str, step: int, values: Sequence[Tensor], stddevs: Sequence[float]) -> Iterator[Tensor]:
        """Each value plus normal noise of its standard deviation, in the value's type or float32 if that is finer, in fresh
        tensors; the values are left as they are."""

    def uniform(self, stream: str, step: int, size: int) -> Tensor:
        """`size` numbers, uniform on [0, 1), with 53 random bits each."""


def stream_number(stream: str) -> int:
    """The number of a stream, or the error that lists them."""
    return named("stream", stream, STREAMS)


# Below this float32 has too few digits left for the product of a normal number, and soon none: nothing would be hidden.
LEAST_STDDEV = 1e-30


def usable(stddevs: Sequence[float]) -> Sequence[float]:
    """The standard deviations, if each would hide something."""
    for stddev in stddevs:
        if not LEAST_STDDEV <= stddev < math.inf:
            raise InvalidArgument(
                f"noise of standard deviation {stddev} was asked for: it must be finite and at least "
                f"{LEAST_STDDEV}. Raise the clipping threshold or the noise multiplier that it comes from."
            )
    return stddevs


def released_tensors(values: Sequence[Tensor]) -> list[Tensor]:
    """Fresh tensors that a release is written to: no memory in which a value without noise has been."""
    return [torch.empty(value.shape, dtype=released_dtype(value), device=value.device) for value in values]


def released_dtype(value: Tensor) -> torch.dtype:
    """The type of a release: the value's own, at least float32."""
    return torch.promote_types(value.dtype, torch.float32)
