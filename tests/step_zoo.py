"""Models, data and pieces of loss functions for the tests of `private.step`; the functions are in broken_steps.py and
sound_steps.py."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import clipless

RECORDS, FEATURES, CLASSES = 24, 6, 3
Function = Callable[[nn.Module, Any], Tensor]


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def plain(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


# Models.


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.4), nn.ReLU(), nn.Linear(16, CLASSES))


def convolution() -> nn.Module:
    inner = nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (1, FEATURES)), *inner, nn.Linear(16, CLASSES))


class Parts(nn.Module):
    """An encoder and a head, which the function calls one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.view(len(x), 2, 3))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(2, 8), nn.Linear(8, CLASSES)
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.lift(x.view(len(x), 3, 2))).mean(1))


class Bag(nn.Module):
    """The mean of the embeddings of tokens, of all of them or of those in the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        found = self.table(tokens)
        if mask is None:
            return self.head(found.mean(1))
        return self.head((found * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True))


class TimeMajor(nn.Module):
    """Reads tokens [t,b] up to each record's length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(20, 8), nn.LSTM(8, 5), nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.inner(self.table(tokens))
        return self.head(states[lengths - 1, torch.arange(tokens.shape[1])])


# Data.


def pairs() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, FEATURES, generator=generator)
    return list(zip(x, torch.randint(CLASSES, (RECORDS,), generator=generator).tolist(), strict=True))


def sentences() -> list[tuple[Tensor, int]]:
    """Tokens of different numbers, and a class."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(1, 20, (3 + k % 5,), generator=generator), k % CLASSES) for k in range(RECORDS)]


def stacked(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])


def padded_to_longest(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return pad_sequence([tokens for tokens, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])


def sorted_by_length(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return padded_to_longest(sorted(samples, key=lambda sample: -len(sample[0])))


def padded_to_eight(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([F.pad(x, (0, 8 - len(x))) for x, _ in samples]), torch.tensor([y for _, y in samples])


def time_major(samples: list[Any], length: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    tokens, labels = padded_to_longest(samples) if length is None else padded_to_eight(samples)
    return tokens.T.contiguous(), torch.tensor([len(x) for x, _ in samples]), labels


@dataclasses.dataclass
class Fields:
    """A batch as an object of one's own."""

    x: Tensor
    y: Tensor


class Opaque:
    """A batch as an object that only its own methods open."""

    __slots__ = ("_content",)

    def __init__(self, *content: Tensor) -> None:
        self._content = content

    def open(self) -> tuple[Tensor, ...]:
        return self._content


def as_fields(samples: list[Any]) -> Fields:
    return Fields(*stacked(samples))


def as_opaque(samples: list[Any]) -> Opaque:
    return Opaque(*stacked(samples))


def as_arrays(samples: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    x, y = stacked(samples)
    return x.numpy(), y.numpy()


def as_rows(samples: list[Any]) -> tuple[list[Tensor], Tensor]:
    """One tensor for each record, in a list."""
    return [x for x, _ in samples], torch.tensor([y for _, y in samples])


@dataclass(frozen=True)
class Entry:
    """A function, made anew by each call of `make`, the model that it is for, and its data."""

    make: Callable[[], Function]
    model: Callable[[], nn.Module] = mlp
    names: str = ""
    data: Callable[[], Any] = pairs
    collate: Callable[[list[Any]], Any] | None = None


# Functions.


def between(change: Callable[[Tensor], Tensor]) -> Function:
    """A function with this between the encoder and the head."""
    return lambda model, batch: cross_entropy(model.head(change(model.encoder(batch[0]))), batch[1])


def weighted(weights: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Function]:
    """The losses times a weight for each, from the detached losses and the labels."""

    def losses(model: nn.Module, batch: Any) -> Tensor:
        found = plain(model, batch)
        return found * weights(found.detach(), batch[1])

    return lambda: losses


def of_inputs(change: Callable[[Tensor], Tensor]) -> Callable[[], Function]:
    """The plain loss on changed inputs."""
    return lambda: lambda model, batch: cross_entropy(model(change(batch[0])), batch[1])


def of_outputs(change: Callable[[Tensor], Tensor]) -> Callable[[], Function]:
    """The plain loss of changed outputs."""
    return lambda: lambda model, batch: cross_entropy(change(model(batch[0])), batch[1])


def masked(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0], (batch[0] > 0).float()), batch[1])


# Runs.


def begin(
    entry: Entry, *, batch_size: int = 16, steps: int = 3, workers: int = 0, data: Any = None, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer, clipless.Private]:
    """A private run of the entry's model on its data, seeded."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = entry.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(
        entry.data() if data is None else data, batch_size=batch_size, collate_fn=entry.collate, num_workers=workers
    )
    given = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp", "steps": steps, "seed": 1}
    return model, optimizer, clipless.make_private(model, optimizer, loader, **{**given, **settings})


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_step(entry: Entry, micro_batch: int | None = None, **settings: Any) -> Tensor:
    """The weights after some steps by `private.step`."""
    model, _, private = begin(entry, **settings)
    function = entry.make()
    try:
        for batch in private.loader.microbatches(micro_batch) if micro_batch else private.loader:
            private.step(function, batch)
    finally:
        private.detach()
    return weights(model)


def by_loop(entry: Entry, micro_batch: int | None = None, **settings: Any) -> Tensor:
    """The weights after the same steps by zero_grad(), `private.backward` and optimizer.step()."""
    model, optimizer, private = begin(entry, **settings)
    function = entry.make()
    try:
        for batch in private.loader.microbatches(micro_batch) if micro_batch else private.loader:
            optimizer.zero_grad()
            for part in batch if micro_batch else (batch,):
                private.backward(function(model, part))
            optimizer.step()
    finally:
        private.detach()
    return weights(model)
