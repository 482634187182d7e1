"""The models that the benchmark trains, each with a batch and a loss.

Index legend: b record, t position, d feature, v word.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipless.app.models.networks import cnn

LEARNING_RATE = 1e-3


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD, the cheapest optimizer, which hides nothing of the cost of privacy."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


@dataclass(frozen=True)
class Problem:
    """A model, its optimizer and a batch of its usual size; `make` builds model and batch from a seed."""

    name: str
    title: str
    batch: int
    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Tensor]
    classes: int
    next_word: bool = False
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd

    def make(self, seed: int = 0, batch: int | None = None) -> tuple[nn.Module, Tensor, Tensor]:
        """The model, the inputs and the targets; the same seed gives the same values."""
        size, generator = batch or self.batch, torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build()
        x = self.inputs(size, generator)
        y = x.roll(-1, 1) if self.next_word else torch.randint(self.classes, (size,), generator=generator)
        return model, x, y

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean over the records, of the mean over the positions."""
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def mlp(width: int = 1024, depth: int = 2) -> nn.Module:
    widths = [784] + [width] * depth
    hidden = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def tabular(features: int = 32, width: int = 64) -> nn.Module:
    """What a table of numbers in a CSV file is classified with."""
    first, second, head = nn.Linear(features, width), nn.Linear(width, width), nn.Linear(width, 2)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), head)


class Residual(nn.Module):
    """The block of a ResNet with GroupNorm of 32 groups: two 3x3 convolutions beside a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(min(32, outside), outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(min(32, outside), outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            norm = nn.GroupNorm(min(32, outside), outside)
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), norm)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


def resnet18(width: int = 64, classes: int = 10) -> nn.Module:
    """ResNet18 for 32x32 images, with GroupNorm in place of BatchNorm."""
    blocks: list[nn.Module] = []
    inside = width
    for outside, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        blocks += [Residual(inside, outside, stride), Residual(outside, outside, 1)]
        inside = outside
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(min(32, width), width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


class LowRank(nn.Module):
    """A frozen linear layer with a trainable low-rank addition (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 8, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


class Attention(nn.Module):
    """Self-attention from linear layers and torch's fused kernel."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Transformer(nn.Module):
    """Words and positions, blocks, and a head: on the mean over positions, or tied to the table on every position."""

    def __init__(self, words: int, width: int, heads: int, depth: int, length: int, classes: int | None) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=classes is None) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words if classes is None else classes, bias=classes is not None)
        self.pooled = classes is not None
        if classes is None:
            nn.init.normal_(self.words.weight, std=width**-0.5)
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        hidden = self.norm(self.blocks(self.words(x) + self.places(positions)))
        return self.head(hidden.mean(1) if self.pooled else hidden)


def encoder(width: int = 384, depth: int = 6, length: int = 128, words: int = 30_522) -> nn.Module:
    return Transformer(words, width, 6, depth, length, classes=2)


def decoder(width: int = 256, depth: int = 6, length: int = 128, words: int = 8_000) -> nn.Module:
    return Transformer(words, width, 4, depth, length, classes=None)


def lora_encoder(width: int = 384, depth: int = 6, length: int = 128, words: int = 30_522) -> nn.Module:
    """The encoder, frozen, with low-rank additions to every query and value, and a trainable head."""
    model = encoder(width, depth, length, words).requires_grad_(False)
    for block in model.get_submodule("blocks").children():
        attention = block.get_submodule("attention")
        for name in ("query", "value"):
            attention.register_module(name, LowRank(attention.get_submodule(name)))  # type: ignore[arg-type]
    model.get_submodule("head").requires_grad_(True)
    return model


class SequenceClassifier(nn.Module):
    """A two-layer LSTM that reads a sequence of feature vectors and classifies it by its last state."""

    def __init__(self, features: int = 64, width: int = 128, classes: int = 10) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def images_of(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda size, generator: torch.randn(size, *shape, generator=generator)


def words_of(length: int, words: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda size, generator: torch.randint(words, (size, length), generator=generator)


def _by_name(*problems: Problem) -> dict[str, Problem]:
    return {problem.name: problem for problem in problems}


PROBLEMS = _by_name(
    Problem("mlp", "MLP 784-1024-1024-10", 512, mlp, images_of(784), 10),
    Problem("cnn", "CNN, 4 layers, tanh, 28x28", 512, lambda: cnn((1, 28, 28), 10), images_of(1, 28, 28), 10),
    Problem("resnet18", "ResNet18-GN, 32x32", 32, resnet18, images_of(3, 32, 32), 10),
    Problem("encoder", "encoder, 6 layers, d=384, T=128, V=30,522", 16, encoder, words_of(128, 30_522), 2),
    Problem("lstm", "LSTM, 2x128, T=16", 256, SequenceClassifier, images_of(16, 64), 10),
    Problem("decoder", "decoder, 6 layers, d=256, T=128, V=8,000, tied", 8, decoder, words_of(128, 8_000), 0, True),
    Problem("lora", "encoder with LoRA on query and value", 16, lora_encoder, words_of(128, 30_522), 2),
    Problem("tabular", "tabular MLP 32-64-64-2, Adam", 256, tabular, images_of(32), 2, optimizer=adam),
)

# The same kinds of models, small enough that a run over all of them takes seconds: for trying out, not for quoting.
TINY_PROBLEMS = _by_name(
    Problem("mlp", "MLP 784-32-32-10", 16, lambda: mlp(32), images_of(784), 10),
    Problem("cnn", "CNN, 4 layers, tanh, 8x8", 16, lambda: cnn((1, 8, 8), 10), images_of(1, 8, 8), 10),
    Problem("resnet18", "ResNet18-GN, width 4, 16x16", 4, lambda: resnet18(4), images_of(3, 16, 16), 10),
    Problem("encoder", "encoder, 1 layer, d=24, T=8, V=50", 4, lambda: encoder(24, 1, 8, 50), words_of(8, 50), 2),
    Problem("lstm", "LSTM, 2x8, T=4", 8, lambda: SequenceClassifier(6, 8), images_of(4, 6), 10),
    Problem("decoder", "decoder, 1 layer, d=16, T=8, V=50", 4, lambda: decoder(16, 1, 8, 50), words_of(8, 50), 0, True),
    Problem("lora", "encoder with LoRA, 1 layer, d=24", 4, lambda: lora_encoder(24, 1, 8, 50), words_of(8, 50), 2),
    Problem("tabular", "tabular MLP 8-16-16-2, Adam", 16, lambda: tabular(8, 16), images_of(8), 2, optimizer=adam),
)
