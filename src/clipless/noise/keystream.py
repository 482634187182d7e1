"""Random bits: AES-256 in counter mode, from the `cryptography` package."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipless.errors import InvalidArgument

Bytes = npt.NDArray[np.uint8]
# Writes its next bytes, so many, into a buffer that has room for SPARE more.
Keystream = Callable[[Bytes, int], None]
SPARE = 16
# The most bytes that can be asked for at a time.
LONGEST = 2**20

_ZEROS = memoryview(bytes(LONGEST))


def keystreams(key: bytes) -> Callable[[int], Keystream]:
    """The keystreams under a key, by number. No two have a byte in common that comes from the same counter."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import CTR
    except ImportError as missing:
        raise InvalidArgument(
            "noise needs the package cryptography, which cannot be imported: pip install cryptography."
        ) from missing
    cipher = AES(key)

    def keystream(number: int) -> Keystream:
        encryptor = Cipher(cipher, CTR(number.to_bytes(8) + bytes(8))).encryptor()

        def write(buffer: Bytes, count: int) -> None:
            encryptor.update_into(_ZEROS[:count], buffer.data)

        return write

    return keystream


def uniform(keystream: Keystream, size: int) -> Tensor:
    """`size` numbers, uniform on [0, 1), with 53 random bits each."""
    words = np.empty(LONGEST // 8 + SPARE // 8, np.uint64)
    values = np.empty(size)
    for start in range(0, size, LONGEST // 8):
        part = values[start : start + LONGEST // 8]
        keystream(words.view(np.uint8), 8 * len(part))
        np.multiply(words[: len(part)] >> np.uint64(11), 2.0**-53, out=part)
    return torch.from_numpy(values)
