"""What the Trainer iterates over: turns, each a share of a logical Poisson batch, in micro-batches.

The Trainer fetches `gradient_accumulation_steps` items, runs each, and then steps. A Poisson batch has more or fewer
micro-batches than that, so an item is a turn of any number of them: one for each turn, and all that are left for the last.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from clipless.errors import Misuse
from clipless.private import Private


class Turn:
    """Some micro-batches of the open batch, collated when asked for, once."""

    def __init__(self, parts: Iterator[Any]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        return self._parts


class Turns(Dataset[Turn]):
    """The turns of one epoch, to be taken in order. A turn that is skipped, as after a resume, draws nothing."""

    def __init__(self, steps: int, turns_per_step: int, part_size: int) -> None:
        self._steps, self._turns_per_step, self._part_size = steps, turns_per_step, part_size
        self._private: Private | None = None
        self._batches: Iterator[Iterator[Any]] | None = None
        self._parts: Iterator[Any] = iter(())

    def draw_from(self, private: Private) -> None:
        """Take the batches of this run."""
        self._private = private

    def __len__(self) -> int:
        return self._steps * self._turns_per_step

    def __getitem__(self, turn: int) -> Turn:
        if self._private is None:
            raise Misuse("the batches of a private run exist only while trainer.train() runs.")
        if turn == 0 or self._batches is None:
            self._batches = iter(self._private.loader.microbatches(self._part_size))
        if turn % self._turns_per_step == 0:
            self._parts = iter(next(self._batches))
        last = (turn + 1) % self._turns_per_step == 0
        return Turn(self._parts if last else islice(self._parts, 1))


def loader_of(turns: Turns) -> "DataLoader[Turn]":
    """A DataLoader over turns, which skips turns by number. Draws nothing from torch's global generator, on which dropout
    depends."""
    return DataLoader(turns, batch_size=1, collate_fn=_only, generator=torch.Generator())


def _only(turns: list[Turn]) -> Turn:
    (turn,) = turns
    return turn
