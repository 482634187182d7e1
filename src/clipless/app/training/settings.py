"""What the settings of a training run mean: its loss, its optimizer, its learning rates, and which cannot be used."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipless.app import clippings
from clipless.app.data import Data
from clipless.app.importing import import_callable
from clipless.app.settings import MOMENTUM, TrainingSettings
from clipless.app.training.tasks import TASKS
from clipless.arguments import unknown_name
from clipless.clipping import CLIPPINGS
from clipless.errors import InvalidArgument


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

# From the share of the steps that is done to the share of the learning rate that is used.
LR_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def losses_for(settings: TrainingSettings, data: Data) -> Callable[[Tensor, Tensor], Tensor]:
    """The function that maps the model's output and the targets to the loss of each record."""
    if settings.loss is None:
        return TASKS[data.task].losses
    return import_callable(settings.loss, "loss", "(output, y) -> one loss for each record")


def optimizer_for(settings: TrainingSettings, data: Data) -> OptimizerChoice:
    """The chosen optimizer. Raises InvalidArgument for settings that cannot be used on this data set."""
    name = settings.clipping.partition("(")[0].strip()
    if name not in (*CLIPPINGS, clippings.SCHEDULE, "none"):
        raise unknown_name("clipping", name, [*CLIPPINGS, "none"])
    if settings.private:
        clippings.parse(settings.clipping)  # or raises
    losses_for(settings, data)  # or raises
    if settings.optimizer not in OPTIMIZERS:
        raise unknown_name("optimizer", settings.optimizer, OPTIMIZERS)
    if settings.lr_schedule not in LR_SCHEDULES:
        raise unknown_name("lr_schedule", settings.lr_schedule, LR_SCHEDULES)
    if settings.momentum is not None and settings.optimizer != "sgd":
        raise InvalidArgument(f"momentum is sgd's, and the optimizer is {settings.optimizer}: leave momentum out.")
    for name, value in (("momentum", settings.momentum or 0.0), ("averaging", settings.averaging)):
        if not 0 <= value < 1:
            raise InvalidArgument(f"{name} is {value}: choose a number from 0 to below 1.")
    if settings.weight_decay is not None and not 0 <= settings.weight_decay < math.inf:
        raise InvalidArgument(f"weight_decay is {settings.weight_decay}: choose 0 or a positive number.")
    for name, count in (("epochs", settings.epochs), ("test_every", settings.test_every)):
        if count < 1:
            raise InvalidArgument(f"{name} is {count}: choose at least one.")
    refuse_batch_size(settings.batch_size, len(data.train))
    if settings.lr is not None and not 0 < settings.lr < math.inf:
        raise InvalidArgument(f"lr is {settings.lr}: choose a positive number, or none for the optimizer's default.")
    if settings.seed is not None and settings.seed < 0:
        raise InvalidArgument(f"seed is {settings.seed}: choose 0 or a positive integer, or none for a fresh one.")
    return OPTIMIZERS[settings.optimizer]


def make_optimizer(settings: TrainingSettings, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The chosen optimizer at the full learning rate."""
    made = OPTIMIZERS[settings.optimizer].make(parameters, base_lr(settings))
    changed = {"momentum": settings.momentum, "weight_decay": settings.weight_decay}
    for group in made.param_groups:
        group.update({name: value for name, value in changed.items() if value is not None})
    return made


def base_lr(settings: TrainingSettings) -> float:
    """The learning rate before its schedule."""
    return OPTIMIZERS[settings.optimizer].lr if settings.lr is None else settings.lr


def lr_factor(settings: TrainingSettings, step: int, steps: int) -> float:
    """The factor on the learning rate at step number `step`, counted from 0. A pure function, so that a resumed run
    continues the schedule.

    >>> lr_factor(TrainingSettings(lr_schedule="linear"), 25, 100)
    0.75
    """
    return LR_SCHEDULES[settings.lr_schedule](step / steps)


def refuse_batch_size(batch_size: int, records: int) -> None:
    """Raises InvalidArgument unless the expected batch is between 1 and the number of training records."""
    if not 1 <= batch_size <= records:
        raise InvalidArgument(f"batch_size is {batch_size}: choose one from 1 to the {records} training records.")
