"""Noise from torch's generators: fast and reproducible, for experiments and tests."""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from clipless.errors import InvalidArgument, InvalidType
from clipless.noise.source import Span, blocks, released_into, stream_number, usable
from clipless.noise.threads import share

# Numbers drawn by one generator; blocks are drawn side by side in threads, and the same whatever their number.
BLOCK = 2**18
# Numbers drawn and added at a time: they stay in the cache, and are too few for torch to call in threads of its own.
PIECE = 2**15
# A CPU generator's state, as it is when nothing has been drawn yet.
_STATE = torch.Generator().get_state().numpy()


class TorchNoise:
    """torch's own generators. Fast, reproducible from the seed, and not cryptographic.

    A pure function of the seed, the stream and the step, without hidden state, so an interrupted run continues with the
    numbers it would have had, however its batches were cut up or fetched ahead. Who knows or guesses the seed can
    subtract the noise: leave it unset (it then comes from the operating system) wherever the result is published.
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
        flat = [value.view(-1) for value in values]

        def write(span: Span, noise: Tensor) -> None:
            flat[span.tensor][span.start : span.stop].copy_(noise)

        self._draw(stream, step, flat, write)
        return iter(values)

    def release(
        self,
        stream: str,
        step: int,
        values: Sequence[Tensor],
        stddevs: Sequence[float],
        into: Sequence[Tensor] | None = None,
    ) -> Iterator[Tensor]:
        outs = released_into(values, into)
        flat = [out.view(-1) for out in outs]
        sums = [value.detach().reshape(-1) for value, _ in zip(values, usable(stddevs), strict=True)]

        def write(span: Span, noise: Tensor) -> None:
            part = slice(span.start, span.stop)
            torch.add(sums[span.tensor][part], noise, alpha=stddevs[span.tensor], out=flat[span.tensor][part])

        self._draw(stream, step, flat, write)
        return iter(outs)

    def _draw(self, stream: str, step: int, flat: Sequence[Tensor], write: Callable[[Span, Tensor], None]) -> None:
        """Hand normals, piece by piece, to `write`, from several threads at once. They are overwritten afterwards."""
        stream_number(stream)

        def draw(numbered: Iterator[tuple[int, list[Span]]]) -> None:
            scratch: dict[torch.device, Tensor] = {}
            for number, block in numbered:
                generators: dict[torch.device, torch.Generator] = {}
                for span in block:
                    device = flat[span.tensor].device
                    if device not in generators:
                        generators[device] = self._generator(stream, step, device, number, len(generators))
                        scratch.setdefault(device, torch.empty(PIECE, device=device))
                    for piece in pieces_of(span):
                        noise = scratch[device][: piece.stop - piece.start]
                        write(piece, noise.normal_(generator=generators[device]))

        share(list(enumerate(blocks(map(len, flat), BLOCK))), draw)

    def uniform(self, stream: str, step: int, size: int) -> Tensor:
        return torch.rand(size, generator=self._generator(stream, step, torch.device("cpu")), dtype=torch.float64)

    def _generator(
        self, stream: str, step: int, device: torch.device, block: int = 0, among: int = 0
    ) -> torch.Generator:
        place = f"{self.seed} {stream_number(stream)} {step} {block} {among}"
        generator = torch.Generator(device)
        if device.type == "cpu":
            return generator.set_state(mersenne_state(place))
        return generator.manual_seed(int.from_bytes(hashlib.sha256(place.encode()).digest()[:8]))


def pieces_of(span: Span) -> Iterator[Span]:
    """The span in pieces.

    >>> [piece.stop - piece.start for piece in pieces_of(Span(0, 5, 5 + PIECE + 3))]
    [32768, 3]
    """
    for start in range(span.start, span.stop, PIECE):
        yield span._replace(start=start, stop=min(start + PIECE, span.stop))


def mersenne_state(place: str) -> Tensor:
    """A CPU generator's state with all 624 words filled from a hash of the text.

    `manual_seed` on the CPU keeps 32 bits only: among a hundred thousand steps two would soon share their noise.
    """
    state = _STATE.copy()
    state[24 : 24 + 624 * 8].view(np.uint64)[:] = np.frombuffer(
        hashlib.shake_256(place.encode()).digest(624 * 4), np.uint32
    )
    return torch.from_numpy(state)
