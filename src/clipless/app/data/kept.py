"""Features that take long to compute are kept on disk, under a name made of what they are made of."""

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VARIABLE = "CLIPLESS_CACHE"


def kept(name: str, made_of: bytes, compute: Callable[[], Tensor]) -> Tensor:
    """What `compute` returns, or what it returned before for the same `made_of`: records, and the constants of the features.

    It is in the folder of CLIPLESS_CACHE, by default `~/.cache/clipless`, and mapped into memory, so that several processes
    share it. Features tell about records what the records do: a folder that is made here is for its owner only. A file that
    was cut short is made again.
    """
    folder = Path(os.environ.get(VARIABLE, "~/.cache/clipless")).expanduser()
    path = folder / f"{name}-{hashlib.sha256(made_of).hexdigest()[:24]}.npy"
    found = _stored(path)
    if found is None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{secrets.token_hex(8)}.npy")
        np.save(unfinished, compute().numpy())
        unfinished.replace(path)
        found = np.load(path, mmap_mode="c")
    return torch.from_numpy(found)


def _stored(path: Path) -> NDArray[Any] | None:
    try:
        return np.load(path, mmap_mode="c")
    except (FileNotFoundError, EOFError, ValueError):
        return None
