"""Noise sources: everything random that a private step releases or depends on comes from one of them.

A source is a pure function of its secret seed, the name of a stream and the number of a step: no hidden state, so an
interrupted run continues with the numbers it would have had, however its batches were cut up or fetched ahead.
"""

import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from clipless.errors import InvalidArgument, InvalidType, named

# Numbers drawn by one generator; chunks are drawn side by side in threads, and the same whatever their number.
CHUNK = 2**18
STREAMS = {"gradient": 1, "statistic": 2, "sample": 3}


class NoiseSource(Protocol):
    """Draws for the numbered steps of one run."""

    name: str
    seed: int | None
    replayable: bool  # whether the same seed, stream and step give the same numbers again

    def normals(self, stream: str, step: int, templates: Iterable[Tensor]) -> Iterator[Tensor]:
        """Standard normal tensors, shaped and placed like the templates, independent of every other stream and step."""

    def uniform(self, stream: str, step: int, size: int) -> Tensor:
        """`size` numbers, uniform on [0, 1), with 53 random bits each."""


class TorchNoise:
    """torch's own generators. Fast, reproducible from the seed, and not cryptographic.

    Who knows or guesses the seed can subtract the noise: leave it unset (it then comes from the operating system)
    wherever the result is published.
    """

    name = "torch"
    replayable = True

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise InvalidType(f"seed must be an integer or None, got {seed!r}.")
        if seed is not None and seed < 0:
            raise InvalidArgument(f"seed must not be negative, got {seed}.")
        self.seed: int | None = secrets.randbits(128) if seed is None else seed

    def normals(self, stream: str, step: int, templates: Iterable[Tensor]) -> Iterator[Tensor]:
        values = [torch.empty(template.shape, device=template.device) for template in templates]
        chunks = [chunk for value in values for chunk in value.view(-1).split(CHUNK)]

        def fill(numbered: tuple[int, Tensor]) -> None:
            number, chunk = numbered
            chunk.normal_(generator=self._generator(stream, step, chunk.device, number))

        if len(chunks) > 1 and torch.get_num_threads() > 1:
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                list(threads.map(fill, enumerate(chunks)))
        else:
            list(map(fill, enumerate(chunks)))
        return iter(values)

    def uniform(self, stream: str, step: int, size: int) -> Tensor:
        return torch.rand(size, generator=self._generator(stream, step, torch.device("cpu")), dtype=torch.float64)

    def _generator(self, stream: str, step: int, device: torch.device, chunk: int = 0) -> torch.Generator:
        assert self.seed is not None
        sequence = np.random.SeedSequence([self.seed, STREAMS[stream], step, chunk])
        generator = torch.Generator(device)
        if device.type == "cpu":
            return generator.set_state(_mersenne_state(sequence))
        return generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))


def _mersenne_state(sequence: np.random.SeedSequence) -> Tensor:
    """A CPU generator's state with all 624 words filled from the sequence.

    `manual_seed` on the CPU keeps 32 bits only: among a hundred thousand steps two would soon share their noise.
    """
    state = torch.Generator().get_state().numpy()
    words = state[24 : 24 + 624 * 8].view(np.uint64)
    words[:] = sequence.generate_state(624)
    return torch.from_numpy(state)


NOISE_SOURCES = {"torch": TorchNoise}


def noise_source(name: str, seed: int | None) -> NoiseSource:
    """The noise source of that name."""
    return named("noise source", name, NOISE_SOURCES)(seed)
