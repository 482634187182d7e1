"""Settings, hooks and callbacks that people use with Lightning: the run is that of a loop of one's own, or is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning_runs import (
    QUIET,
    Classifier,
    MeanClassifier,
    by_hand,
    fit,
    loader,
    privacy,
    records,
    same_weights,
    trainer,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

import clipless
from clipless.integrations.lightning import PrivateTraining

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

Closure = Callable[[], Any]


class Skips(Classifier):
    """Leaves out the batch `at` of every epoch, as `on_train_batch_start` may."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.at else None


class SkipsTheLastEpoch(Skips):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return super().on_train_batch_start(batch, batch_idx) if self.trainer.current_epoch else None


class LeavesTheLast(Classifier):
    """Steps all batches but the last."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Closure | None = None) -> None:
        optimizer.step(closure=closure) if batch_idx < 5 else closure and closure()


class StopsAfterAPart(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("make", "options", "steps"),
    [
        (lambda: Skips(0), {}, 0),
        (lambda: Skips(2), {}, 2),
        (lambda: Skips(5), {}, 5),
        (lambda: Skips(5), {"max_epochs": 2}, 5),
        (lambda: Skips(5), {"accumulate_grad_batches": 2}, 2),
        (lambda: Skips(4), {"accumulate_grad_batches": 2}, 2),
        (lambda: SkipsTheLastEpoch(5), {"max_epochs": 2}, 11),
        (LeavesTheLast, {}, 5),
        (Classifier, {"accumulate_grad_batches": 2, "others": StopsAfterAPart}, 0),
    ],
)
def test_a_batch_that_is_dropped_is_refused_when_the_epoch_ends(
    make: Callable[[], Classifier], options: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    """The steps before it are counted."""
    callback = PrivateTraining(privacy())
    others = [options["others"]()] if "others" in options else []
    settings = {name: value for name, value in options.items() if name != "others"}
    with pytest.raises(clipless.Misuse, match="drawn and not stepped.*on_train_batch_start"):
        trainer(tmp_path, callback, *others, **settings).fit(make(), loader())
    assert callback.spent().steps == steps


class OwnStep(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Closure | None = None) -> None:
        optimizer.step(closure=closure)


class ClosureFirst(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Closure | None = None) -> None:
        assert closure is not None
        closure()
        optimizer.optimizer.step()


class OwnBackward(MeanClassifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)


class ClipsLater(pl.Callback):
    """Finds no gradient to clip before the step."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.gradient_clip_val = 1e-6


class Stops(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> int:
        trainer.should_stop = index == 3
        return -1  # only that of the module counts


@pytest.mark.parametrize(
    ("make", "others", "options", "steps"),
    [
        (OwnStep, (), {}, 6),
        (ClosureFirst, (), {}, 6),
        (OwnBackward, (), {}, 6),
        (Classifier, (ClipsLater,), {}, 6),
        (Classifier, (Stops,), {}, 4),
        (Classifier, (), {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}, 12),
        (Classifier, (), {"profiler": "simple"}, 6),
        (Classifier, (), {"limit_train_batches": 3}, 3),
        (Classifier, (), {"max_time": "00:01:00:00"}, 6),
        (Classifier, (), {"barebones": True}, 6),
    ],
)
def test_the_run_is_that_of_a_loop_bit_for_bit(
    make: type[Classifier], others: tuple[Any, ...], options: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    module, callback = fit(tmp_path, *[other() for other in others], module=make(), **options)
    torch.manual_seed(1)
    expected, private = by_hand(steps, make())
    assert same_weights(module, expected)
    assert callback.private is not None
    assert callback.private.ledger == private.ledger


def test_epochs_that_are_added_within_the_run_are_refused(tmp_path: Path) -> None:
    class Longer(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.fit_loop.max_epochs = 2

    with pytest.raises(clipless.BudgetSpent, match="all 6 planned steps"):
        fit(tmp_path, Longer())


def train_averaged(folder: Path, *others: pl.Callback, seed: int = 1, path: Path | None = None) -> Any:
    torch.manual_seed(seed)
    module, callback = Classifier(), PrivateTraining(privacy(), ledger=folder / "ledger.jsonl")
    average = EMAWeightAveraging(decay=0.5, update_starting_at_step=0)
    kept = ModelCheckpoint(folder / "kept", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    options = {"max_epochs": 2, "enable_checkpointing": True, "val_check_interval": 3}
    made = trainer(folder, callback, average, kept, *others, **options)
    made.fit(module, loader(), DataLoader(records(), batch_size=16), ckpt_path=path)
    return module, callback


@pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended.*")
def test_averages_of_every_step_are_those_of_the_private_run(tmp_path: Path) -> None:
    """Validations in between see the average; the run goes on with its own weights, also after a resume."""
    seen: list[Tensor] = []

    class Keeps(pl.Callback):
        def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
            seen.append(nn.utils.parameters_to_vector(pl_module.parameters()).detach().clone())

    module, callback = train_averaged(tmp_path, Keeps())
    expected, private = by_hand(12)
    assert callback.private.ledger == private.ledger
    steps = [*seen[1:], nn.utils.parameters_to_vector(expected.parameters()).detach()]
    assert len(steps) == 12
    average = steps[0]
    for weights in steps[1:]:
        average = 0.5 * average + 0.5 * weights
    found = nn.utils.parameters_to_vector(module.parameters()).detach()
    torch.testing.assert_close(found, average)
    again, resumed = train_averaged(tmp_path, seed=77, path=tmp_path / "kept" / "step=8.ckpt")
    assert same_weights(module, again)
    assert resumed.private.ledger == private.ledger


class Measured(Classifier):
    """Counts right answers with torchmetrics, while it trains or when it is validated."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.accuracy, self.in_training = MulticlassAccuracy(3), training

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found = self.head(self.body(x))
        if self.in_training:
            self.log("accuracy", self.accuracy(found, y))
        return nn.functional.cross_entropy(found, y, reduction="none")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self(batch[0]), batch[1])
        self.log("val_accuracy", self.accuracy)


def test_metrics_that_keep_records_are_for_validation(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="was not logged"), pytest.raises(clipless.UnsupportedModule, match="accuracy"):
        fit(tmp_path, module=Measured(training=True))
    module, callback = Measured(training=False), PrivateTraining(privacy())
    made = trainer(tmp_path, callback)
    made.fit(module, loader(), DataLoader(records(), batch_size=16))
    assert callback.spent().steps == 6
    assert 0 < float(made.callback_metrics["val_accuracy"]) < 1
