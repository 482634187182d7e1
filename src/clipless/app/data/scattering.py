"""Scattering features: a fixed transform of each image by itself, so they cost no privacy and need no weights."""

import hashlib
import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from clipless.app.data.dataset import Data
from clipless.errors import InvalidArgument, MissingLibrary

SUFFIX = "+scattering"
SCALES = 2
CHANNEL_GROUPS = 27
PART = 512


def with_scattering(data: Data) -> Data:
    """The same records as features (channels, height / 4, width / 4), normalised within each record in groups of channels.

    They are kept in the folder of CLIPLESS_CACHE, by default `~/.cache/clipless`, under a name made of the images, and
    mapped into memory, so that several processes share them.
    """
    if len(data.shape) != 3:
        raise InvalidArgument(
            f"{data.name} has no images, and scattering is a transform of images: leave {SUFFIX} out."
        )
    parts = []
    for part in (data.train, data.test):
        images, labels = part.tensors
        parts.append(TensorDataset(_kept(images), labels))
    return replace(
        data, name=data.name + SUFFIX, train=parts[0], test=parts[1], shape=tuple(parts[0].tensors[0].shape[1:])
    )


def _kept(images: Tensor) -> Tensor:
    folder = Path(os.environ.get("CLIPLESS_CACHE", "~/.cache/clipless")).expanduser()
    digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()[:24]
    path = folder / f"scattering-{digest}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.npy")
        np.save(partial, scattered(images).numpy())
        partial.replace(path)
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def scattered(images: Tensor) -> Tensor:
    """The features of each image by itself."""
    transform = _kymatio().Scattering2D(J=SCALES, shape=tuple(images.shape[2:]))
    found = []
    for part in images.split(PART):
        features = transform(part.contiguous()).flatten(1, 2)
        groups = CHANNEL_GROUPS if features.shape[1] % CHANNEL_GROUPS == 0 else 1
        found.append(torch.nn.functional.group_norm(features, groups))
    return torch.cat(found).float()


def _kymatio() -> Any:
    import scipy.special

    if "sph_harm" not in vars(scipy.special):  # kymatio 0.3 imports this name, which new versions of SciPy lack
        scipy.special.sph_harm = lambda m, n, theta, phi: scipy.special.sph_harm_y(n, m, phi, theta)
    try:
        return importlib.import_module("kymatio.torch")
    except ImportError as error:
        raise MissingLibrary(
            f"scattering features need kymatio ({error}): pip install --no-deps kymatio appdirs."
        ) from error
