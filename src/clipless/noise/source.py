"""The noise source of a run: all randomness that is released, or that the guarantee depends on, comes from it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clipless.errors import InvalidArgument
from clipless.noise.adding import by_numpy, chunks_by, compiled
from clipless.noise.keys import KEY, Keys, erase, keys_of, keystream, require_cipher, words
from clipless.noise.normals import CHUNK, standard_normals

# Below this float32 has too few digits left for the product of a normal number, and soon none: nothing would be hidden.
LEAST_STDDEV = 1e-30


class NoiseSource:
    """Draws for the numbered steps of one run, from keys.

    Asked again for the same step, it gives the same numbers, as long as it has the step's key. `on_device` draws for tensors
    on other devices with torch's generator there; else all noise is made in main memory and copied.
    """

    def __init__(self, name: str, keys: Keys, on_device: bool = False) -> None:
        require_cipher()
        self.name = name
        self._keys, self._on_device = keys, on_device

    def release(
        self,
        stream: str,
        step: int,
        values: Sequence[Tensor],
        stddevs: Sequence[float],
        divisor: float = 1.0,
        places: Sequence[int] | None = None,
        types: Sequence[torch.dtype] | None = None,
    ) -> list[Tensor]:
        """Each value plus normal noise of its standard deviation, rounded to a multiple of `grid(stddev)`, then divided.

        The divisor is positive. Results are of these types, by default the values', or in float32 if that is finer, in fresh
        tensors, whose memory has never held a value without noise. The values are left as they are. They use the numbers of
        the step's stream one after the other, or, with ascending `places`, each from its place on: a shard of a value gets
        the noise that it would get as a part of the whole.
        """
        sums, outs, fits = [], [], True
        for stddev in set(stddevs):
            least = min(stddev, stddev / divisor)
            if not (least >= LEAST_STDDEV and stddev / divisor < math.inf):
                raise _too_little(least)
        for number, (value, _) in enumerate(zip(values, stddevs, strict=True)):
            here = value.detach() if value.requires_grad else value
            if not (here.dtype is torch.float32 and here.is_cpu and here.is_contiguous()):
                here = self._brought_here(here)
            if here.dtype is torch.float32:
                outs.append(torch.empty_like(here))
            else:
                kind = here.dtype if types is None else torch.promote_types(types[number], torch.float32)
                fits = fits and kind is torch.float32
                outs.append(torch.empty_like(here, dtype=kind))
            sums.append(here)
        key = self._keys.key(stream, step)
        fast = compiled()
        if fast and fits:
            fast.add(key, sums, stddevs, 1 / divisor, outs, places)
        else:
            by_numpy(key, sums, stddevs, 1 / divisor, outs, places, chunks_by(fast))
        for number, value in enumerate(values):
            if not value.is_cpu:
                place, made = 0 if places is None else places[number], outs[number]
                outs[number] = self._sent_back(key, number, place, value.detach(), stddevs[number], divisor, made)
        erase(key)
        return outs

    def _brought_here(self, value: Tensor) -> Tensor:
        """The value in main memory, where noise is added; an empty tensor if that is done on the value's own device."""
        dtype = torch.promote_types(value.dtype, torch.float32)
        if self._on_device and not value.is_cpu:
            return torch.empty(0, dtype=dtype)
        return value.to("cpu", dtype).contiguous()

    def _sent_back(
        self, key: bytearray, number: int, place: int, value: Tensor, stddev: float, divisor: float, made: Tensor
    ) -> Tensor:
        """A release on the value's own device: what was made in main memory, or drawn there by torch's generator, which is
        not cryptographic and leaves the last bits as floating point does."""
        if not self._on_device:
            return made.to(value.device)
        # Counters that no number in main memory is made of, and no other part of the same value.
        seed = int(words(key, ((number + 1) << 64) + place, 1)[0]) >> 1
        noise = torch.empty(value.shape, dtype=torch.promote_types(value.dtype, made.dtype), device=value.device)
        noise.normal_(generator=torch.Generator(value.device).manual_seed(seed))
        return noise.mul_(stddev).add_(value).div_(divisor).to(made.dtype)

    def vector(self, step: int, number: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Standard normal numbers shaped like these tensors, on their devices: vector `number` of a step's projections. The
        privacy analysis treats them as public."""
        key = self._keys.key("projection", step)
        own = keystream(key, number * KEY // 16, KEY)
        numbers = _normals(own, sum(map(Tensor.numel, like)))
        erase(key)
        erase(own)
        parts = numbers.split([one.numel() for one in like])
        return [part.view(one.shape).to(one.device, one.dtype) for part, one in zip(parts, like, strict=True)]

    def sample_key(self, draw: int) -> bytearray:
        """The key of a batch."""
        return self._keys.key("sample", draw)

    def forget_steps(self, before: int) -> None:
        """The noise of earlier steps cannot be computed any more, unless from a seed."""
        self._keys.forget_steps(before)

    def forget_draws(self, before: int) -> None:
        """Earlier batches cannot be drawn any more, unless from a seed."""
        self._keys.forget_draws(before)

    def renew(self, step: int, draw: int) -> None:
        """Continue with new random keys from that step and draw on."""
        self._take(self._keys.renewed(step, draw))

    def erase(self) -> None:
        """The run is over: no key is left."""
        self._keys.erase()

    def state_dict(self) -> dict[str, Any]:
        """What gives all later noise and batches, and none earlier unless it is a seed: keep it as secret as the data."""
        return self._keys.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._take(keys_of(state))

    def _take(self, keys: Keys) -> None:
        self._keys.erase()
        self._keys = keys


def _normals(key: bytearray, count: int) -> Tensor:
    fast = compiled()
    if fast is None:
        return torch.from_numpy(standard_normals(key, count))
    numbers = torch.empty(-(-count // CHUNK) * CHUNK, dtype=torch.float64, device="cpu")
    fast.normals(key, numbers, 0)
    return numbers[:count]


def _too_little(stddev: float) -> InvalidArgument:
    return InvalidArgument(
        f"noise of standard deviation {stddev} was asked for: it must be finite and at least {LEAST_STDDEV}. Raise the "
        "clipping threshold or the noise multiplier that it comes from."
    )
