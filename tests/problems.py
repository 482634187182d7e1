"""Problems: small models with a batch and a loss. Every engine test runs over all of them; a new layer is one more."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 3


@dataclass(frozen=True)
class Problem:
    """`model()` is a fresh seeded model, `inputs(b)` gives b records; the loss is the cross entropy of each record."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def batch(self, records: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        return self.inputs(records), torch.randint(CLASSES, (records,))


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def normal(*shape: int) -> Callable[[int], Tensor]:
    return lambda b: torch.randn(b, *shape)


def tokens(vocabulary: int, length: int) -> Callable[[int], Tensor]:
    return lambda b: torch.randint(vocabulary, (b, length))


def headed(*layers: nn.Module, features: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(features, CLASSES))


class Scale(nn.Module):
    """A parameter of its own beside a child: the generic rule."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.child = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.child(x) * self.scale)


class Branching(nn.Module):
    """Control flow that depends on the data, which vmap cannot trace."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        rows = [row * self.up if float(row.sum()) > 0 else row * self.down for row in x]
        return torch.stack(rows)


class TwoOutputs(nn.Module):
    """Takes keywords and returns a dictionary of two tensors, one of them an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, *, signal: Tensor, gain: float) -> dict[str, Tensor]:
        out = signal @ self.weight * gain
        return {"left": out[:, :2], "right": out[:, 2:].tanh(), "rank": out.argmax(1)}


class KeywordModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = TwoOutputs(), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(signal=x, gain=0.5)
        return self.head(torch.cat([out["left"], out["right"]], 1))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, CLASSES), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def reused(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer, nn.Flatten(), nn.LazyLinear(CLASSES))


def initialised(model: nn.Module, example: Tensor) -> nn.Module:
    model(example)
    return model


def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, CLASSES))
    model[0].requires_grad_(False)
    return model


def conv(layer: nn.Module, *example: int) -> Callable[[], nn.Module]:
    features = layer(torch.randn(1, *example)).numel()
    return lambda: headed(type(layer)(**_settings(layer)), features=features)


def _settings(layer: Any) -> dict[str, Any]:
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return {name: getattr(layer, name) for name in names} | {"bias": layer.bias is not None}


PROBLEMS: dict[str, Problem] = {
    "linear-2d": Problem(
        lambda: headed(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), features=5), normal(4)
    ),
    "linear-2d-no-bias": Problem(lambda: headed(nn.Linear(4, 5, bias=False), features=5), normal(4)),
    "linear-3d-ghost": Problem(lambda: headed(nn.Linear(8, 9), features=27), normal(3, 8)),
    "linear-3d-written-out": Problem(lambda: headed(nn.Linear(2, 2), features=20), normal(10, 2)),
    "linear-3d-no-bias": Problem(lambda: headed(nn.Linear(8, 9, bias=False), features=27), normal(3, 8)),
    "linear-4d": Problem(lambda: headed(nn.Linear(4, 5), features=30), normal(2, 3, 4)),
    "conv1d": Problem(conv(nn.Conv1d(2, 4, 3, stride=2, padding=1, dilation=2), 2, 9), normal(2, 9)),
    "conv1d-circular": Problem(conv(nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), 2, 6), normal(2, 6)),
    "conv2d": Problem(conv(nn.Conv2d(2, 3, 3, padding=1), 2, 5, 5), normal(2, 5, 5)),
    "conv2d-ghost": Problem(conv(nn.Conv2d(6, 8, 3, stride=2), 6, 5, 5), normal(6, 5, 5)),
    "conv2d-grouped": Problem(conv(nn.Conv2d(4, 6, (3, 2), groups=2, bias=False), 4, 5, 4), normal(4, 5, 4)),
    "conv2d-depthwise": Problem(conv(nn.Conv2d(4, 4, 3, groups=4, padding="same"), 4, 5, 5), normal(4, 5, 5)),
    "conv2d-same-even": Problem(conv(nn.Conv2d(2, 3, 2, padding="same", dilation=(1, 2)), 2, 5, 5), normal(2, 5, 5)),
    "conv2d-reflect": Problem(conv(nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"), 2, 5, 5), normal(2, 5, 5)),
    "conv3d": Problem(conv(nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), 2, 3, 4, 3), normal(2, 3, 4, 3)),
    "embedding": Problem(lambda: headed(nn.Embedding(11, 4), features=20), tokens(11, 5)),
    "embedding-padding": Problem(lambda: headed(nn.Embedding(3, 4, padding_idx=0), features=20), tokens(3, 5)),
    "embedding-1d": Problem(lambda: headed(nn.Embedding(5, 4), features=4), lambda b: torch.randint(5, (b,))),
    "layer-norm": Problem(lambda: headed(nn.LayerNorm(4), features=4), normal(4)),
    "layer-norm-3d": Problem(lambda: headed(nn.Linear(4, 4), nn.LayerNorm((3, 4)), features=12), normal(3, 4)),
    "layer-norm-positions": Problem(lambda: headed(nn.LayerNorm(4, bias=False), features=12), normal(3, 4)),
    "group-norm": Problem(lambda: headed(nn.GroupNorm(2, 4), features=36), normal(4, 3, 3)),
    "group-norm-2d": Problem(lambda: headed(nn.GroupNorm(2, 4), features=4), normal(4)),
    "generic-own-and-child": Problem(lambda: headed(Scale(4), features=4), normal(4)),
    "generic-prelu": Problem(lambda: headed(nn.Linear(4, 4), nn.PReLU(4), features=4), normal(4)),
    "generic-rms-norm": Problem(lambda: headed(nn.RMSNorm(4), features=12), normal(3, 4)),
    "generic-transposed": Problem(lambda: headed(nn.ConvTranspose2d(2, 3, 2), features=48), normal(2, 3, 3)),
    "generic-branching": Problem(lambda: headed(Branching(4), features=4), normal(4)),
    "generic-keywords": Problem(KeywordModel, normal(4)),
    "reused-linear": Problem(lambda: initialised(reused(nn.Linear(4, 4)), torch.ones(2, 4)), normal(4)),
    "reused-linear-3d": Problem(lambda: initialised(reused(nn.Linear(4, 4)), torch.ones(2, 3, 4)), normal(3, 4)),
    "reused-conv": Problem(
        lambda: initialised(reused(nn.Conv2d(2, 2, 3, padding=1)), torch.ones(2, 2, 4, 4)), normal(2, 4, 4)
    ),
    "reused-scale": Problem(lambda: initialised(reused(Scale(4)), torch.ones(2, 4)), normal(4)),
    "unused": Problem(Unused, normal(4)),
    "frozen": Problem(frozen_first, normal(4)),
    "in-place": Problem(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(36, 8),
            nn.ELU(inplace=True),
            nn.Linear(8, 3),
        ),
        normal(1, 5, 5),
    ),
}
