"""Problems: small models with a batch and a loss. Every engine test runs over all of them; a new layer is one more."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipless.torch_internals import instance_norm_writes
from operators import scaled_product

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


class Bagged(nn.Module):
    """Bags of tokens, each token with a weight that is learned, given by keyword and before the tokens."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.weights, self.bag = nn.Embedding(7, 1), nn.EmbeddingBag(7, 4, mode="sum", padding_idx=padding_idx)

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(per_sample_weights=self.weights(x).squeeze(2), input=x)


class TwoBags(nn.Module):
    """One table for two bags of each record."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 4, mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x[:, :2]) + self.bag(x[:, 1:]).tanh()


class OwnOperator(nn.Module):
    """An operator of somebody's own, which torch.func does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(5, 4), nn.Parameter(0.3 * torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return scaled_product(self.first(x), self.weight)


class Pairing(nn.Module):
    """A bilinear form of two parts of its input, given by keyword in the other order."""

    def __init__(self, left: int, right: int, out: int, bias: bool = True) -> None:
        super().__init__()
        self.split, self.form = (left, right), nn.Bilinear(left, right, out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.split(self.split, dim=-1)
        return self.form(input2=right, input1=left)


class Conv1D(nn.Module):
    """What transformers calls Conv1D: a linear layer that keeps its weight transposed."""

    __module__, __qualname__ = "transformers.pytorch_utils", "Conv1D"

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class Sized(nn.Module):
    """A transposed convolution that is told the size of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.ConvTranspose2d(2, 3, 3, stride=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.widen(x, output_size=(9, 8))


def randomised(model: nn.Module) -> nn.Module:
    """The model in eval mode, with running statistics as if it had been trained."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2.0)
    return model.eval()


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


def transposed(layer: nn.Module, *example: int) -> Problem:
    return Problem(conv(layer, *example), normal(*example))


def _settings(layer: Any) -> dict[str, Any]:
    names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"]
    names += ["output_padding"] if layer.transposed else []
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
    "conv-transpose1d": transposed(nn.ConvTranspose1d(2, 4, 3, stride=2, padding=1, output_padding=1), 2, 5),
    "conv-transpose1d-far": transposed(
        nn.ConvTranspose1d(2, 3, 3, padding=3, output_padding=2, dilation=3, bias=False), 2, 6
    ),
    "conv-transpose2d": transposed(nn.ConvTranspose2d(2, 3, 2), 2, 3, 3),
    "conv-transpose2d-ghost": transposed(nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1), 8, 2, 2),
    "conv-transpose2d-ghost-output-padding": transposed(
        nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=(1, 0)), 8, 2, 2
    ),
    "conv-transpose2d-grouped": transposed(nn.ConvTranspose2d(4, 6, (3, 2), groups=2, bias=False), 4, 3, 4),
    "conv-transpose2d-depthwise": transposed(
        nn.ConvTranspose2d(4, 4, 3, groups=4, stride=(2, 3), padding=(0, 1), output_padding=(0, 2)), 4, 3, 2
    ),
    "conv-transpose2d-dilated": transposed(
        nn.ConvTranspose2d(2, 3, 3, padding=(2, 0), output_padding=1, dilation=2), 2, 4, 3
    ),
    "conv-transpose2d-sized": Problem(lambda: headed(Sized(), features=216), normal(2, 3, 3)),
    "conv-transpose3d": transposed(
        nn.ConvTranspose3d(2, 4, 2, stride=(1, 2, 3), padding=(0, 1, 0), output_padding=(0, 1, 1), groups=2), 2, 2, 3, 2
    ),
    "embedding": Problem(lambda: headed(nn.Embedding(11, 4), features=20), tokens(11, 5)),
    "embedding-padding": Problem(lambda: headed(nn.Embedding(3, 4, padding_idx=0), features=20), tokens(3, 5)),
    "embedding-1d": Problem(lambda: headed(nn.Embedding(5, 4), features=4), lambda b: torch.randint(5, (b,))),
    **{
        f"embedding-bag-{mode}": Problem(
            lambda mode=mode: headed(nn.EmbeddingBag(7, 4, mode=mode), features=4), tokens(7, 5)
        )
        for mode in ("sum", "mean", "max")
    },
    **{
        f"embedding-bag-{mode}-padding": Problem(
            lambda mode=mode: headed(nn.EmbeddingBag(3, 4, mode=mode, padding_idx=1), features=4), tokens(3, 2)
        )
        for mode in ("sum", "mean", "max")
    },
    **{
        f"embedding-bag-{mode}-reused": Problem(lambda mode=mode: headed(TwoBags(mode), features=4), tokens(5, 4))
        for mode in ("sum", "mean", "max")
    },
    "embedding-bag-weighted": Problem(lambda: headed(Bagged(), features=4), tokens(7, 5)),
    "embedding-bag-weighted-padding": Problem(lambda: headed(Bagged(padding_idx=2), features=4), tokens(7, 5)),
    "layer-norm": Problem(lambda: headed(nn.LayerNorm(4), features=4), normal(4)),
    "layer-norm-3d": Problem(lambda: headed(nn.Linear(4, 4), nn.LayerNorm((3, 4)), features=12), normal(3, 4)),
    "layer-norm-positions": Problem(lambda: headed(nn.LayerNorm(4, bias=False), features=12), normal(3, 4)),
    "group-norm": Problem(lambda: headed(nn.GroupNorm(2, 4), features=36), normal(4, 3, 3)),
    "group-norm-2d": Problem(lambda: headed(nn.GroupNorm(2, 4), features=4), normal(4)),
    "rms-norm": Problem(lambda: headed(nn.RMSNorm(4), features=4), normal(4)),
    "rms-norm-positions": Problem(lambda: headed(nn.RMSNorm(4, eps=1e-3), features=12), normal(3, 4)),
    "rms-norm-3d": Problem(lambda: headed(nn.Linear(4, 4), nn.RMSNorm((3, 4)), features=24), normal(2, 3, 4)),
    "instance-norm1d": Problem(lambda: headed(nn.InstanceNorm1d(3, affine=True), features=12), normal(3, 4)),
    "instance-norm2d": Problem(
        lambda: headed(nn.Conv2d(2, 3, 2, bias=False), nn.InstanceNorm2d(3, affine=True), features=12), normal(2, 3, 3)
    ),
    "instance-norm3d": Problem(
        lambda: headed(nn.InstanceNorm3d(2, affine=True, eps=0.1), features=24), normal(2, 2, 2, 3)
    ),
    "own-operator": Problem(OwnOperator, normal(5)),
    "bilinear": Problem(lambda: headed(Pairing(2, 3, 4), features=4), normal(5)),
    "bilinear-no-bias": Problem(lambda: headed(Pairing(2, 3, 4, bias=False), features=4), normal(5)),
    "bilinear-3d-ghost": Problem(lambda: headed(Pairing(3, 4, 5), features=15), normal(3, 7)),
    "bilinear-3d-written-out": Problem(lambda: headed(Pairing(1, 2, 2), features=20), normal(10, 3)),
    "bilinear-4d": Problem(lambda: headed(Pairing(2, 3, 2), features=12), normal(2, 3, 5)),
    "reused-bilinear": Problem(lambda: initialised(reused(Pairing(2, 2, 4)), torch.ones(2, 4)), normal(4)),
    "transposed-linear": Problem(lambda: headed(Conv1D(5, 4), features=5), normal(4)),
    "transposed-linear-3d-ghost": Problem(lambda: headed(Conv1D(9, 8), features=27), normal(3, 8)),
    "transposed-linear-3d-written-out": Problem(lambda: headed(Conv1D(3, 2), features=30), normal(10, 2)),
    "reused-transposed-linear": Problem(lambda: initialised(reused(Conv1D(4, 4)), torch.ones(2, 3, 4)), normal(3, 4)),
    "prelu": Problem(lambda: headed(nn.Linear(4, 4), nn.PReLU(), features=4), normal(4)),
    "prelu-channels": Problem(lambda: headed(nn.Linear(4, 4), nn.PReLU(4), features=4), normal(4)),
    "prelu-channels-4d": Problem(lambda: headed(nn.Conv2d(2, 3, 2), nn.PReLU(3), features=12), normal(2, 3, 3)),
    "generic-own-and-child": Problem(lambda: headed(Scale(4), features=4), normal(4)),
    "generic-branching": Problem(lambda: headed(Branching(4), features=4), normal(4)),
    "generic-keywords": Problem(KeywordModel, normal(4)),
    "reused-linear": Problem(lambda: initialised(reused(nn.Linear(4, 4)), torch.ones(2, 4)), normal(4)),
    "reused-linear-3d": Problem(lambda: initialised(reused(nn.Linear(4, 4)), torch.ones(2, 3, 4)), normal(3, 4)),
    "reused-conv": Problem(
        lambda: initialised(reused(nn.Conv2d(2, 2, 3, padding=1)), torch.ones(2, 2, 4, 4)), normal(2, 4, 4)
    ),
    "reused-conv-transpose": Problem(
        lambda: initialised(reused(nn.ConvTranspose2d(2, 2, 3, padding=1)), torch.ones(2, 2, 4, 4)), normal(2, 4, 4)
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
if not instance_norm_writes():  # where it does, it is refused
    PROBLEMS["instance-norm2d-running"] = Problem(
        lambda: randomised(headed(nn.InstanceNorm2d(2, affine=True, track_running_stats=True), features=12)),
        normal(2, 2, 3),
    )
