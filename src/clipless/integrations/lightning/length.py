"""How long a run is: from the Trainer's epochs, steps and limits to steps that are planned in advance."""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from clipless.errors import InvalidArgument, Misuse
from clipless.neighbours import ZERO_OUT, pass_length
from clipless.sampling.fetching import source_of


@dataclass(frozen=True)
class RunLength:
    """`epochs` or `steps`, as make_private takes them, and the shape of an epoch, before the Trainer limits it."""

    expected_batch: int
    steps_per_epoch: int
    parts: int
    epochs: int | None
    steps: int | None

    @property
    def batches_per_epoch(self) -> int:
        """What the Trainer counts in an epoch: batches, or parts where each batch is split."""
        return self.steps_per_epoch * self.parts

    def rebatched(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The loader, with the expected batch as its batch size."""
        if self.parts == 1:
            return loader
        data, _, options = source_of(loader)
        return DataLoader(data, batch_size=self.expected_batch, **options)


def run_length(trainer: Trainer, loader: DataLoader[Any], parts: int, neighbours: str = ZERO_OUT) -> RunLength:
    """The length of the run that this Trainer is set to. Raises if it has no end, or if a limit would cut a batch. Where the
    number of records is secret, an epoch has all steps."""
    data, batch_size, _ = source_of(loader)
    if batch_size is None:
        raise InvalidArgument(
            "the DataLoader has no batch_size: give it one, the expected number of records in a batch."
        )
    expected, records = batch_size * parts, len(data)  # type: ignore[arg-type]
    if expected > records and neighbours == ZERO_OUT:
        raise InvalidArgument(
            f"batch_size={batch_size} times accumulate_grad_batches={parts} is more than the {records} records: lower one "
            "of them."
        )
    whole_epoch = pass_length(neighbours, records, expected, trainer.max_steps)
    per_epoch = _limited(trainer.limit_train_batches, whole_epoch, parts)
    shape = expected, whole_epoch, parts
    epochs, steps = trainer.max_epochs, trainer.max_steps
    if epochs in (None, -1) and steps == -1:
        raise InvalidArgument("training without end has no budget: give Trainer(max_epochs=...) or max_steps=.")
    if epochs is None or epochs == -1:
        return RunLength(*shape, None, steps)
    if neighbours == ZERO_OUT and per_epoch == whole_epoch and (steps == -1 or steps >= epochs * per_epoch):
        return RunLength(*shape, epochs, None)
    total = epochs * per_epoch if steps == -1 else min(steps, epochs * per_epoch)
    return RunLength(*shape, None, total)


def _limited(limit: float | int, steps: int, parts: int) -> int:
    """Steps of an epoch under `limit_train_batches`, which is a share of it or a number of batches."""
    batches = min(limit, steps * parts) if isinstance(limit, int) else int(steps * parts * limit)
    if batches % parts:
        raise Misuse(
            f"limit_train_batches={limit} ends an epoch in the middle of a batch of {parts} parts: give a multiple of "
            f"accumulate_grad_batches={parts}."
        )
    if batches < 1:
        raise InvalidArgument(f"limit_train_batches={limit} leaves no step: raise it.")
    return int(batches) // parts
