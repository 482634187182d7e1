"""Features that take long to compute are kept on disk, under a name made of what they are made of."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VARIABLE = "CLIPLESS_CACHE"


def kept(name: str, made_of: bytes, compute: Callable[[], Tensor]) -> Tensor:
    """What `compute` returns, or what it returned before for the same `made_of`: records, and the constants of the features.

    It is in the folder of CLIPLESS_CACHE, by default `~/.cache/clipless`, and mapped into memory, so that several processes
    share it.
    """
    folder = Path(os.environ.get(VARIABLE, "~/.cache/clipless")).expanduser()
    path = folder / f"{name}-{hashlib.sha256(made_of).hexdigest()[:24]}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.npy")
        np.save(unfinished, compute().numpy())
        unfinished.replace(path)
    return torch.from_numpy(np.load(path, mmap_mode="c"))
