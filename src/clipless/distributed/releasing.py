"""What several processes release together: the sum over all of them with noise, the same on each."""

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from clipless.distributed.ranks import Alone, Ranks, refuse_different
from clipless.native.by_torch import widest


class Places(Protocol):
    """The shards of a model, of which each begins at some place of all parameters laid end to end."""

    def places(self) -> list[int]: ...


class NoisyRelease(Protocol):
    """From sums, their standard deviations, their places in the stream of the noise, and types, to what is released."""

    def __call__(
        self,
        values: Sequence[Tensor],
        stddevs: Sequence[float],
        *,
        places: Sequence[int],
        types: Sequence[torch.dtype],
    ) -> list[Tensor]: ...


def released_sums(
    ranks: Alone | Ranks,
    shards: Places | None,
    sums: Sequence[Tensor],
    stddevs: Sequence[float],
    types: Sequence[torch.dtype],
    statistic: Tensor | None,
    release: NoisyRelease,
) -> list[Tensor]:
    """The release of every sum over the ranks, in these types. Noise is added to those that have arrived while others are on
    their way. The `statistic` is replaced by its sum over the ranks on the same occasion. Sums of shards are totals already.

    Sums are added up in float64: float32 would round them by more than leaving out one record may change them.
    """
    shared = [] if statistic is None else [statistic]
    if shards is not None:
        ranks.add_up(shared)
        return release(sums, stddevs, places=shards.places(), types=types)
    sums = [value.to(widest(value.device)) for value in sums]
    places = [0, *accumulate(tensor.numel() for tensor in sums)]
    made: dict[int, Tensor] = {}

    def take(numbers: Sequence[int]) -> None:
        own = [number for number in numbers if number < len(sums)]
        parts = release(
            [sums[k] for k in own],
            [stddevs[k] for k in own],
            places=[places[k] for k in own],
            types=[types[k] for k in own],
        )
        made.update(zip(own, parts, strict=True))

    ranks.add_up([*sums, *shared], take)
    return [made[number] for number in range(len(sums))]


def one_digest(what: str, told: Sequence[str], sharded: bool) -> str:
    """The digest of a release, from what every rank told of it: the digest of its own part, and of what all have. Raises
    unless the latter, and without shards both, are the same on all."""
    refuse_different(what, [both.split()[1] if sharded else both for both in told])
    parts = [both.split()[0] for both in told]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:32] if sharded else parts[0]
