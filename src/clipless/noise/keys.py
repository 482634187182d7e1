"""The keys of a run's noise and of its batches, from a seed or from the operating system, and the random bits under a key.

Noise is drawn for numbered steps, in a stream for the gradient and one for the threshold policy's statistic; so are the
vectors of random projections; batches for numbered draws. Every use has a key of 256 bits of its own; the bits are those of
AES-256 in counter mode.
"""

import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipless.arguments import named
from clipless.errors import InvalidArgument, InvalidType, Misuse
from clipless.native import checked
from clipless.native.noise import Keystream, build_keystream

try:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    MISSING = False
except ImportError:
    MISSING = True

STREAMS = {"gradient": 1, "statistic": 2, "sample": 3, "projection": 4}
KEY = 32
# The zeros that the cipher encrypts, as many as can be asked for at a time, and the room that it needs beyond the end.
_ZEROS = memoryview(bytes(2**20))
_SPARE = 16


class Keys(Protocol):
    """A key for each stream and place: the number of a step, or of a draw in the stream "sample"."""

    def key(self, stream: str, place: int) -> bytearray:
        """The key, in memory of its own: erase it after use."""

    def forget_steps(self, before: int) -> None:
        """The keys of earlier steps are not needed any more."""

    def forget_draws(self, before: int) -> None:
        """The keys of earlier draws are not needed any more."""

    def renewed(self, step: int, draw: int) -> "Keys":
        """New random keys from that step and draw on."""

    def erase(self) -> None:
        """No key is needed any more."""

    def state(self) -> dict[str, Any]:
        """What gives all later keys, for a checkpoint."""


class SeededKeys:
    """A pure function of seed, stream and place. Whoever knows the seed can compute all noise."""

    def __init__(self, seed: int) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InvalidType(f"seed must be an integer or None, got {seed!r}.")
        if seed < 0:
            raise InvalidArgument(f"seed must not be negative, got {seed}.")
        self.seed = seed

    def key(self, stream: str, place: int) -> bytearray:
        text = f"{self.seed} {STREAMS.get(stream) or named('stream', stream, STREAMS)} {place}"
        return bytearray(hashlib.sha256(text.encode()).digest())

    def forget_steps(self, before: int) -> None:
        pass

    def forget_draws(self, before: int) -> None:
        pass

    def renewed(self, step: int, draw: int) -> "SeededKeys":
        return SeededKeys(int.from_bytes(os.urandom(16)))

    def erase(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"seed": self.seed}


class Chain:
    """A key that only moves forward: from the key of one place all later keys can be computed, and no earlier one.

    At each place the key is expanded by AES-256 in counter mode to its successor and to one key for each use. The successor
    then takes its place in memory. Finding an earlier key means finding an AES key from what it has encrypted.
    """

    __slots__ = ("_key", "place")

    def __init__(self, key: bytearray, place: int = 0) -> None:
        self._key, self.place = key, place

    def at(self, place: int, use: int) -> bytearray:
        """The key of a use, counted from 1, at the present place or at a later one."""
        if place < self.place:
            raise Misuse(
                f"the key of place {place} is gone: keys move forward only, and this one is at {self.place}. Go on from a "
                "checkpoint."
            )
        if place == self.place:
            return keystream(self._key, KEY // 16 * use, KEY)
        later = bytearray(self._key)
        for _ in range(place - self.place):
            _replace(later)
        found = keystream(later, KEY // 16 * use, KEY)
        erase(later)
        return found

    def forward(self, place: int) -> None:
        """Forget all earlier keys."""
        for _ in range(place - self.place):
            _replace(self._key)
        self.place = max(place, self.place)

    def erase(self) -> None:
        erase(self._key)

    def saved(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._key), dtype=torch.uint8)


class ForwardKeys:
    """Keys of the operating system's randomness that move forward only, one chain for steps and one for draws.

    A copy would draw the same noise, so there is none; a forked child has its keys erased.
    """

    def __init__(self, steps: Chain | None = None, draws: Chain | None = None) -> None:
        self._steps = steps or Chain(bytearray(os.urandom(KEY)))
        self._draws = draws or Chain(bytearray(os.urandom(KEY)))
        self._erased = ""
        _LIVING.add(self)

    def key(self, stream: str, place: int) -> bytearray:
        use = STREAMS.get(stream) or named("stream", stream, STREAMS)
        if self._erased:
            raise Misuse(self._erased)
        return self._draws.at(place, 1) if stream == "sample" else self._steps.at(place, use)

    def forget_steps(self, before: int) -> None:
        self._steps.forward(before)

    def forget_draws(self, before: int) -> None:
        self._draws.forward(before)

    def renewed(self, step: int, draw: int) -> "ForwardKeys":
        return ForwardKeys(Chain(bytearray(os.urandom(KEY)), step), Chain(bytearray(os.urandom(KEY)), draw))

    def erase(self, why: str = "the run was detached and its keys are erased: call make_private anew.") -> None:
        self._erased = why
        self._steps.erase()
        self._draws.erase()

    def state(self) -> dict[str, Any]:
        if self._erased:
            raise Misuse(f"there is no state to save: {self._erased}")
        return {
            "step": self._steps.place,
            "step_key": self._steps.saved(),
            "draw": self._draws.place,
            "draw_key": self._draws.saved(),
        }

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Misuse("the keys of a run cannot be copied or pickled: both copies would draw the same noise.")


def keys_of(state: Mapping[str, Any]) -> Keys:
    """The keys that `state()` described."""
    if "seed" in state:
        return SeededKeys(state["seed"])
    try:
        chains = [Chain(bytearray(state[f"{name}_key"].numpy()), state[name]) for name in ("step", "draw")]
    except KeyError as missing:
        raise InvalidArgument(f"not a state of a private run: {missing} is missing in its noise.") from missing
    return ForwardKeys(*chains)


def _replace(key: bytearray) -> None:
    """Overwrite a key with its successor."""
    successor = keystream(key, 0, KEY)
    key[:] = successor
    erase(successor)


_LIVING: "weakref.WeakSet[ForwardKeys]" = weakref.WeakSet()


def _in_child() -> None:
    for keys in list(_LIVING):
        keys.erase(
            "this process was forked after make_private, and keys are not repeated in a child: call make_private in the "
            "process that trains."
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def require_cipher() -> None:
    """Raises InvalidArgument if the package is not there."""
    if MISSING:
        raise InvalidArgument(
            "noise needs the package cryptography, which cannot be imported: pip install cryptography."
        )


def keystream(key: bytes | bytearray, counter: int, size: int) -> bytearray:
    """`size` bytes under a key, from block `counter` of 16 bytes on; at most 2**20 at a time. The memory is the caller's own
    and can be erased after use."""
    fast = compiled()
    if fast is None:
        bits = bytearray(size + _SPARE)
        by_package(key, counter, bits, size)
    else:
        bits = bytearray(-(-size // 16) * 16)
        fast(key if isinstance(key, bytearray) else bytearray(key), counter, bits)
    if len(bits) > size:
        del bits[size:]
    return bits


def by_package(key: bytes | bytearray, counter: int, into: bytearray, size: int) -> None:
    """The same by the `cryptography` package, into memory with room for SPARE more bytes."""
    Cipher(AES(key), CTR(counter.to_bytes(16))).encryptor().update_into(_ZEROS[:size], into)


def _pairs(ours: Keystream) -> Iterator[tuple[Tensor, Tensor]]:
    for key, counter, blocks in ((range(32), 0, 9), (range(7, 39), 12345, 1), (range(99, 131), (2**50 + 3) << 64, 5)):
        made, expected = bytearray(16 * blocks), bytearray(16 * blocks + _SPARE)
        ours(bytearray(key), counter, made)
        by_package(bytes(key), counter, expected, 16 * blocks)
        yield torch.frombuffer(made, dtype=torch.uint8), torch.frombuffer(expected[: 16 * blocks], dtype=torch.uint8)


compiled = checked(build_keystream, _pairs)


def erase(memory: bytearray) -> None:
    """Overwrite with zeros, in place."""
    memory[:] = bytes(len(memory))


def words(key: bytes | bytearray, counter: int, count: int) -> npt.NDArray[np.uint64]:
    """Random words of 64 bits, from block `counter` on."""
    return np.frombuffer(keystream(key, counter, 8 * count), "<u8")
