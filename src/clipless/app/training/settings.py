"""Everything that decides a training run besides the data."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipless import defaults
from clipless.app import clippings
from clipless.app.data import Data
from clipless.app.importing import import_callable
from clipless.app.training.tasks import TASKS
from clipless.arguments import unknown_name
from clipless.clipping import CLIPPINGS, Clipping
from clipless.errors import InvalidArgument
from clipless.phases import Schedule

MOMENTUM = 0.9


@dataclass(frozen=True)
class OptimizerChoice:
    """A torch optimizer by name, and the learning rate used when none is given."""

    make: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
    lr: float


OPTIMIZERS: dict[str, OptimizerChoice] = {
    "sgd": OptimizerChoice(lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=MOMENTUM), 0.15),
    "adam": OptimizerChoice(lambda p, lr: torch.optim.Adam(p, lr=lr), 0.01),
    "adamw": OptimizerChoice(lambda p, lr: torch.optim.AdamW(p, lr=lr), 0.01),
    "nadam": OptimizerChoice(lambda p, lr: torch.optim.NAdam(p, lr=lr), 0.01),
    "rmsprop": OptimizerChoice(lambda p, lr: torch.optim.RMSprop(p, lr=lr), 0.005),
    "adagrad": OptimizerChoice(lambda p, lr: torch.optim.Adagrad(p, lr=lr), 0.05),
}

# From the share of the steps that is done to the share of the learning rate that is taken.
LR_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training run.

    `clipping` is a name, a text such as `dc-p(percentile=0.3)`, or "none", which trains without privacy; `epsilon`, `delta`
    and `accountant` are then unused. `delta=None` means N**-1.1, `lr=None` the optimizer's default, `seed=None` randomness
    from the operating system, `noise=None` secure noise, or seeded where there is a seed. A `noise_multiplier` replaces
    `epsilon`. `momentum` (of sgd) and `weight_decay` are the optimizer's own unless given. `averaging` is the decay of a
    moving average of the weights, which is tested and saved in place of the last ones; 0 means none. The test records are
    looked at after every `test_every` epochs and at the end. `loss` names a function `package.module:function` of (output,
    y) with one loss for each record; None stands for the task's own.
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
    momentum: float | None = None
    weight_decay: float | None = None
    lr_schedule: str = "constant"
    averaging: float = 0.0
    unit_gradients: bool = False
    test_every: int = 1
    loss: str | None = None

    @property
    def private(self) -> bool:
        return self.clipping != "none"

    @property
    def how(self) -> Clipping | Schedule:
        """The clipping that the text describes."""
        return clippings.parse(self.clipping)

    def losses_for(self, data: Data) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of each record, from the model's output and the targets."""
        if self.loss is None:
            return TASKS[data.task].losses
        return import_callable(self.loss, "loss", "(output, y) -> one loss for each record")

    def optimizer_for(self, data: Data) -> OptimizerChoice:
        """The chosen optimizer. Raises InvalidArgument for settings that cannot be used on this data set."""
        name = self.clipping.partition("(")[0].strip()
        if name not in (*CLIPPINGS, clippings.SCHEDULE, "none"):
            raise unknown_name("clipping", name, [*CLIPPINGS, "none"])
        if self.private:
            assert self.how  # or raises
        self.losses_for(data)  # or raises
        if self.optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", self.optimizer, OPTIMIZERS)
        if self.lr_schedule not in LR_SCHEDULES:
            raise unknown_name("lr_schedule", self.lr_schedule, LR_SCHEDULES)
        if self.momentum is not None and self.optimizer != "sgd":
            raise InvalidArgument(f"momentum is sgd's, and the optimizer is {self.optimizer}: leave momentum out.")
        for name, value in (("momentum", self.momentum or 0.0), ("averaging", self.averaging)):
            if not 0 <= value < 1:
                raise InvalidArgument(f"{name} is {value}: choose a number from 0 to below 1.")
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise InvalidArgument(f"weight_decay is {self.weight_decay}: choose 0 or a positive number.")
        for name, count in (("epochs", self.epochs), ("test_every", self.test_every)):
            if count < 1:
                raise InvalidArgument(f"{name} is {count}: choose at least one.")
        refuse_batch_size(self.batch_size, len(data.train))
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise InvalidArgument(f"lr is {self.lr}: choose a positive number, or none for the optimizer's default.")
        if self.seed is not None and self.seed < 0:
            raise InvalidArgument(f"seed is {self.seed}: choose 0 or a positive integer, or none for a fresh one.")
        return OPTIMIZERS[self.optimizer]

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The chosen optimizer at the full learning rate."""
        made = OPTIMIZERS[self.optimizer].make(parameters, self.base_lr)
        changed = {"momentum": self.momentum, "weight_decay": self.weight_decay}
        for group in made.param_groups:
            group.update({name: value for name, value in changed.items() if value is not None})
        return made

    @property
    def base_lr(self) -> float:
        """The learning rate before its schedule."""
        return OPTIMIZERS[self.optimizer].lr if self.lr is None else self.lr

    def lr_factor(self, step: int, steps: int) -> float:
        """The share of the learning rate that step number `step`, counted from 0, takes. A pure function of both, so that
        a resumed run goes on where it was.

        >>> TrainingSettings(lr_schedule="linear").lr_factor(25, 100)
        0.75
        """
        return LR_SCHEDULES[self.lr_schedule](step / steps)


def refuse_batch_size(batch_size: int, records: int) -> None:
    """Raises InvalidArgument unless the expected batch is between 1 and the number of training records."""
    if not 1 <= batch_size <= records:
        raise InvalidArgument(f"batch_size is {batch_size}: choose one from 1 to the {records} training records.")
