"""The papers' networks for images and tables, each `(shape, classes) -> nn.Module`."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from clipless.errors import InvalidArgument

GROUPS = 8


def cnn_relu(shape: tuple[int, ...], classes: int) -> nn.Module:
    """GLOBAL's network for MNIST: 26,010 parameters at 1x28x28 and 10 classes."""
    _refuse_small("cnn-relu", shape, 16)
    features = nn.Sequential(
        nn.Conv2d(shape[0], 16, kernel_size=8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    return nn.Sequential(*features, nn.Linear(_width(features, shape), 32), nn.ReLU(), nn.Linear(32, classes))


class _ThreeChannels(nn.Module):
    """Repeats a grey image in three channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x


def dc_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """DC's network for MNIST: GLOBAL's with three input channels, 28,058 parameters at 28x28 and 10 classes."""
    _refuse_small("dc-cnn", shape, 16)
    return nn.Sequential(_ThreeChannels(), *cnn_relu((3, *shape[1:]), classes))  # type: ignore[misc]


def cifar_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """GLOBAL's network for CIFAR-10: 62,006 parameters at 3x32x32 and 10 classes."""
    _refuse_small("cifar-cnn", shape, 16)
    features = nn.Sequential(
        nn.Conv2d(shape[0], 6, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    top = (nn.Linear(_width(features, shape), 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes))
    return nn.Sequential(*features, *top)


def global_mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """GLOBAL's network for tables: hidden layers of 64, 64 and 32 ReLU units."""
    sizes = (math.prod(shape), 64, 64, 32)
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, classes))


class _Residual(nn.Module):
    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, wider, 3, stride, padding=1, bias=False),
            nn.GroupNorm(GROUPS, wider),
            nn.ReLU(),
            nn.Conv2d(wider, wider, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, wider),
        )
        same = stride == 1 and channels == wider
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, wider, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet8_gn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A residual network of 8 layers with GroupNorm, for CIFAR-10: the small relative of ResNet18-GN."""
    _refuse_small("resnet8-gn", shape, 8)
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, 16),
        nn.ReLU(),
        _Residual(16, 16, 1),
        _Residual(16, 32, 2),
        _Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def linear_from_zero(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A linear layer that starts at zero, for precomputed features."""
    layer = nn.Linear(math.prod(shape), classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def _width(features: nn.Module, shape: tuple[int, ...]) -> int:
    with torch.no_grad():
        return int(features(torch.zeros(1, *shape)).shape[1])


def _refuse_small(name: str, shape: tuple[int, ...], side: int) -> None:
    if len(shape) != 3 or min(shape[1:]) < side:
        raise InvalidArgument(
            f"{name} needs images of shape (channels, height, width) with sides of at least {side}, not {shape}. Use the "
            "model 'mlp' or 'linear'."
        )
