"""Noise from a seed: fast and repeatable, for experiments, tests and runs that must end bit for bit the same."""

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from clipless.errors import InvalidArgument, InvalidType
from clipless.noise.adding import add_noise, write_noise
from clipless.noise.keystream import keystreams, uniform
from clipless.noise.source import released_dtype, released_tensors, stream_number, usable


class SeededNoise:
    """A pure function of the seed, the stream and the step, without hidden state.

    So an interrupted run continues with the numbers it would have had, however its batches were cut up or fetched
    ahead. Numbers for tensors in main memory come from AES under a key that is a hash of the three, and are the same
    on every machine; other devices use torch's own generator, there. Who knows or guesses the seed can subtract the
    noise: leave it unset (it then comes from the operating system) wherever the result is published.
    """

    name = "torch"
    replayable = True
    seed: int | None

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise InvalidType(f"seed must be an integer or None, got {seed!r}.")
        if seed is not None and seed < 0:
            raise InvalidArgument(f"seed must not be negative, got {seed}.")
        self.seed = secrets.randbits(128) if seed is None else seed

    def normals(self, stream: str, step: int, templates: Iterable[Tensor]) -> Iterator[Tensor]:
        values = [torch.empty(template.shape, device=template.device) for template in templates]
        write_noise(self._key(stream, step), [_here(value) for value in values])
        for number, value in _elsewhere(values):
            value.normal_(generator=self._generator(value.device, stream, step, number))
        return iter(values)

    def release(self, stream: str, step: int, values: Sequence[Tensor], stddevs: Sequence[float]) -> Iterator[Tensor]:
        outs = released_tensors(values)
        flat = [_here(out) for out in outs]
        pairs = zip(values, usable(stddevs), strict=True)
        sums = [_here(value.to(released_dtype(value)).contiguous()) for value, _ in pairs]
        add_noise(self._key(stream, step), sums, stddevs, flat)
        for number, out in _elsewhere(outs):
            noise = torch.empty(out.shape, device=out.device)
            noise.normal_(generator=self._generator(out.device, stream, step, number))
            torch.add(values[number].detach(), noise, alpha=stddevs[number], out=out)
        return iter(outs)

    def uniform(self, stream: str, step: int, size: int) -> Tensor:
        return uniform(keystreams(self._key(stream, step))(0), size)

    def _key(self, stream: str, step: int, *place: int) -> bytes:
        """256 bits for one use, different for every other seed, stream, step and place."""
        return hashlib.sha256(" ".join(map(str, (self.seed, stream_number(stream), step, *place))).encode()).digest()

    def _generator(self, device: torch.device, stream: str, step: int, tensor: int) -> torch.Generator:
        return torch.Generator(device).manual_seed(int.from_bytes(self._key(stream, step, tensor)[:8]))


def _here(tensor: Tensor) -> Tensor:
    """The tensor as one line; nothing of one on another device."""
    return tensor.detach().view(-1) if tensor.device.type == "cpu" else torch.empty(0)


def _elsewhere(tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The tensors that are not in main memory, with their numbers."""
    return ((number, tensor) for number, tensor in enumerate(tensors) if tensor.device.type != "cpu")
