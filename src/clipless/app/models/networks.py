"""Small networks without batch statistics, each `(shape, classes) -> nn.Module`."""

import math

import torch
from torch import nn

from clipless.errors import InvalidArgument

HIDDEN = 64
LARGE_IMAGE = 16
SMALL_IMAGE = 4


def linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Logistic regression: the strongest choice on few records at a small epsilon."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """One hidden layer of 64 tanh units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, classes))


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two convolutions and two linear layers for images of shape (channels, height, width).

    For 1x28x28 and 10 classes this is the 4-layer tanh network of 26,010 parameters of the DP-SGD literature. Images
    with a side below 16 get 3x3 kernels; below 4, and anything but an image, raise InvalidArgument.
    """
    if len(shape) != 3 or min(shape[1:]) < SMALL_IMAGE:
        raise InvalidArgument(
            f"cnn needs images of shape (channels, height, width) with sides of at least {SMALL_IMAGE}, not {shape}. "
            "Use the model 'mlp' or 'linear'."
        )
    features = _large(shape[0]) if min(shape[1:]) >= LARGE_IMAGE else _small(shape[0])
    with torch.no_grad():
        width = features(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(*features, nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, classes))


def _large(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )


def _small(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
