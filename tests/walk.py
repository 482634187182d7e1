"""One steady step of training as the interpreter sees it: our calls, the files they are in, and the changes from file to
file. `python tests/walk.py` prints them in order."""

import sys
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import clipless

SOURCE = Path(clipless.__file__).parent
# The first steps are checked, and so is every one whose number is a power of two.
STEADY = 6


class Walk(NamedTuple):
    """The calls of one step in order, as (file, function)."""

    calls: list[tuple[str, str]]

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    @property
    def changes(self) -> int:
        return sum(one != other for (one, _), (other, _) in pairwise(self.calls))

    def __str__(self) -> str:
        return f"{len(self.calls)} calls in {len(self.files)} files, {self.changes} changes of file"


def walk(model: nn.Module, inputs: torch.Tensor, clipping: str) -> Walk:
    """One step of private training in which nothing is new and nothing is checked."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(inputs, torch.arange(len(inputs)) % 5)
    private = clipless.make_private(
        model, optimizer, data, noise_multiplier=1.0, batch_size=32, steps=STEADY, seed=1, clipping=clipping
    )
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            calls.append((path.relative_to(SOURCE).as_posix(), frame.f_code.co_name))

    batches, before = iter(private.loader), sys.getprofile()
    for number in range(1, STEADY + 1):
        sys.setprofile(note if number == STEADY else before)
        x, y = next(batches)
        optimizer.zero_grad()
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        sys.setprofile(before)
    private.detach()
    return Walk(calls)


def mlp() -> Walk:
    """A perceptron of two layers, auto-s."""
    torch.manual_seed(0)
    return walk(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)), torch.randn(500, 20), "auto-s")


def cnn() -> Walk:
    """A small convolutional network, dc-e."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    return walk(nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 5)), torch.randn(500, 1, 8, 8), "dc-e")


if __name__ == "__main__":
    taken = mlp()
    for file, together in groupby(taken.calls, key=lambda call: call[0]):
        print(file, *(name for _, name in together))  # noqa: T201
    print("mlp:", taken)  # noqa: T201
    print("cnn with dc-e:", cnn())  # noqa: T201
