"""A data set of any size that takes no memory, because its records are computed from their numbers; and steps on it, drawing
included."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from clipless.app.bench.problems import Problem
from clipless.app.bench.ways import MANY_STEPS, NOISE_MULTIPLIER, SEED, InputsAndLabels, Runner, train_step
from clipless.clipping import Clipping
from clipless.private import make_private


class MadeUp(Dataset[InputsAndLabels]):
    """`size` records with this many features and two classes, the same whenever they are asked for.

    >>> x, y = MadeUp(10**8, features=3)[99_999_999]
    >>> x.shape, y
    (torch.Size([3]), tensor(1))
    """

    def __init__(self, size: int, features: int) -> None:
        self._size, self._frequencies = size, torch.arange(1, features + 1, dtype=torch.float64)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> InputsAndLabels:
        x, y = self.__getitems__([number])
        return x[0], y[0]

    def __getitems__(self, numbers: Sequence[int]) -> InputsAndLabels:
        """All these records at once, as a batch."""
        which = torch.as_tensor(numbers)
        return torch.outer(which.double(), self._frequencies).sin_().float(), which % 2


def collate(records: Any) -> Any:
    """A batch is returned unchanged; records are stacked into one."""
    return records if isinstance(records, tuple) else default_collate(records)


def plain_steps(problem: Problem, data: MadeUp) -> Runner:
    """Steps on records drawn uniformly with replacement, at a cost that does not depend on how many there are."""
    model, _, _ = problem.make(SEED)
    generator = torch.Generator().manual_seed(SEED)

    def draw() -> InputsAndLabels:
        numbers: list[int] = torch.randint(len(data), (problem.batch,), generator=generator).tolist()
        return data.__getitems__(numbers)

    return _runner(draw, partial(train_step, problem, model, problem.optimizer(model)), lambda: None)


def private_steps(problem: Problem, data: MadeUp, clipping: Clipping) -> Runner:
    """Steps on Poisson batches of the private loader."""
    model, _, _ = problem.make(SEED)
    optimizer = problem.optimizer(model)
    private = make_private(
        model,
        optimizer,
        DataLoader(data, batch_size=problem.batch, collate_fn=collate),
        noise_multiplier=NOISE_MULTIPLIER,
        delta=1 / (10 * len(data)),
        steps=MANY_STEPS,
        clipping=clipping,
        loss_reduction="mean",
    )
    batches = iter(private.loader.microbatches(len(data)))

    def draw() -> InputsAndLabels:
        (batch,) = next(batches)
        return batch

    return _runner(draw, partial(train_step, problem, model, optimizer), private.detach)


def _runner(
    draw: Callable[[], InputsAndLabels], step: Callable[[Tensor, Tensor], None], close: Callable[[], None]
) -> Runner:
    """Drawing is part of the step: it is what may grow with the data."""
    nothing = torch.empty(0)
    return Runner(lambda: (nothing, nothing), lambda _x, _y: step(*draw()), close)
