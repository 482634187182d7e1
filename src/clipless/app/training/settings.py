"""Everything that decides a training run besides the data."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from clipless import defaults
from clipless.app.data import Data
from clipless.arguments import unknown_name
from clipless.clipping import CLIPPINGS
from clipless.errors import InvalidArgument


@dataclass(frozen=True)
class OptimizerChoice:
    """A torch optimizer by name, and the learning rate used when none is given."""

    make: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
    lr: float


OPTIMIZERS: dict[str, OptimizerChoice] = {
    "sgd": OptimizerChoice(lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), 0.15),
    "adam": OptimizerChoice(lambda p, lr: torch.optim.Adam(p, lr=lr), 0.01),
    "adamw": OptimizerChoice(lambda p, lr: torch.optim.AdamW(p, lr=lr), 0.01),
    "nadam": OptimizerChoice(lambda p, lr: torch.optim.NAdam(p, lr=lr), 0.01),
    "rmsprop": OptimizerChoice(lambda p, lr: torch.optim.RMSprop(p, lr=lr), 0.005),
    "adagrad": OptimizerChoice(lambda p, lr: torch.optim.Adagrad(p, lr=lr), 0.05),
}


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training run.

    `clipping="none"` trains without privacy; `epsilon`, `delta` and `accountant` are then unused. `delta=None` means
    N**-1.1, `lr=None` the optimizer's default, `seed=None` randomness from the operating system, `noise=None` secure noise,
    or seeded where there is a seed. A `noise_multiplier`
    replaces `epsilon`.
    """

    model: str = "mlp"
    clipping: str = defaults.CLIPPING
    epsilon: float = 3.0
    delta: float | None = None
    epochs: int = 40
    batch_size: int = 256
    optimizer: str = "sgd"
    lr: float | None = None
    seed: int | None = None
    accountant: str = defaults.ACCOUNTANT
    noise: str | None = None
    noise_multiplier: float | None = None

    @property
    def private(self) -> bool:
        return self.clipping != "none"

    def optimizer_for(self, data: Data) -> OptimizerChoice:
        """The chosen optimizer. Raises InvalidArgument for settings that cannot be used on this data set."""
        if self.clipping not in (*CLIPPINGS, "none"):
            raise unknown_name("clipping", self.clipping, [*CLIPPINGS, "none"])
        if self.optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", self.optimizer, OPTIMIZERS)
        if self.epochs < 1:
            raise InvalidArgument(f"epochs is {self.epochs}: train for at least one.")
        refuse_batch_size(self.batch_size, len(data.train))
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise InvalidArgument(f"lr is {self.lr}: choose a positive number, or none for the optimizer's default.")
        if self.seed is not None and self.seed < 0:
            raise InvalidArgument(f"seed is {self.seed}: choose 0 or a positive integer, or none for a fresh one.")
        return OPTIMIZERS[self.optimizer]


def refuse_batch_size(batch_size: int, records: int) -> None:
    """Raises InvalidArgument unless the expected batch is between 1 and the number of training records."""
    if not 1 <= batch_size <= records:
        raise InvalidArgument(f"batch_size is {batch_size}: choose one from 1 to the {records} training records.")
