"""Trainer.fit with PrivateTraining is the private run of a loop of one's own."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from lightning_runs import (
    BATCH,
    QUIET,
    RECORDS,
    Classifier,
    MeanClassifier,
    RecordClassifier,
    by_hand,
    fit,
    loader,
    privacy,
    records,
    reduction_of,
    same_weights,
    trainer,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import clipless
from clipless.integrations.lightning import PrivateTraining

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]


@pytest.mark.parametrize("make", [Classifier, RecordClassifier, MeanClassifier])
def test_three_steps_are_those_of_a_loop_bit_for_bit(make: type[Classifier], tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, callback = fit(tmp_path, module=make(), max_steps=3, max_epochs=-1)
    torch.manual_seed(1)
    expected, private = by_hand(3, make())
    assert same_weights(module, expected)
    assert callback.private is not None
    assert callback.private.ledger == private.ledger
    assert callback.private.steps_taken == 3
    assert callback.spent().epsilon == private.ledger.spent(1e-3).epsilon


def test_two_epochs_with_validation_are_those_of_a_loop_without(tmp_path: Path) -> None:
    """Validation, in random order, changes no random number of training."""
    torch.manual_seed(1)
    module, callback = Classifier(), PrivateTraining(privacy())
    validation = DataLoader(records(), batch_size=16, shuffle=True)
    trainer(tmp_path, callback, max_epochs=2, val_check_interval=2).fit(module, loader(), validation)
    expected, private = by_hand(12)
    assert same_weights(module, expected)
    assert callback.private is not None
    assert callback.private.plan == private.plan
    assert callback.private.ledger == private.ledger


@pytest.mark.parametrize("make", [Classifier, MeanClassifier])
@pytest.mark.parametrize("clipping", ["abadi", "dc-p"])
def test_accumulated_batches_are_parts_of_one_batch(make: type[Classifier], clipping: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = make()
    callback = PrivateTraining(privacy(clipping=clipping), **reduction_of(module))
    torch.manual_seed(1)
    trainer(tmp_path, callback, accumulate_grad_batches=2, max_steps=3, max_epochs=-1).fit(module, loader(BATCH // 2))
    torch.manual_seed(1)
    expected, private = by_hand(3, make(), parts=2, clipping=clipping)
    assert callback.private is not None
    assert callback.private.plan.expected_batch == BATCH
    assert same_weights(module, expected)
    assert callback.private.ledger == private.ledger


def test_a_part_is_about_as_large_as_the_others_and_none_is_missing() -> None:
    _, private = by_hand(1)
    for batch in private.loader.parts(3):
        sizes = [len(x) for x, _ in batch]
        assert len(sizes) == 3
        assert max(sizes) - min(sizes) <= 1
        break


class Looks(pl.Callback):
    """Looks at every parameter's gradient in every hook that the Trainer calls."""

    def __init__(self) -> None:
        self.seen: dict[str, list[list[Tensor | None]]] = {}

    def look(self, name: str, module: pl.LightningModule) -> None:
        self.seen.setdefault(name, []).append([None if p.grad is None else p.grad.clone() for p in module.parameters()])

    @staticmethod
    def of(name: str) -> Any:
        return lambda self, trainer, module, *args, **kwargs: self.look(name, module)


HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_") and name not in ("on_exception",)]
for hook in HOOKS:
    setattr(Looks, hook, Looks.of(hook))


def test_no_hook_sees_a_gradient_without_noise(tmp_path: Path) -> None:
    looks = Looks()
    torch.manual_seed(1)
    module, callback = Classifier(), PrivateTraining(privacy())
    released: list[list[Tensor]] = []

    class Released(pl.Callback):
        def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
            assert all(p.grad is None for p in module.parameters()) or released

        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *rest: Any) -> None:
            released.append([p.grad.clone() for p in module.parameters() if p.grad is not None])

    trainer(tmp_path, looks, callback, Released(), max_steps=4, max_epochs=-1).fit(module, loader())
    torch.manual_seed(1)
    by_step: list[list[Tensor]] = []
    expected = Classifier()
    optimizer = expected.configure_optimizers()
    arguments = privacy().arguments()
    private = clipless.make_private(expected, optimizer, records(), **arguments, batch_size=BATCH, steps=4)
    for batch in private.loader:
        optimizer.zero_grad()
        private.accumulate(lambda model, part: model.training_step(part, 0), batch)
        optimizer.step()
        by_step.append([p.grad.clone() for p in expected.parameters() if p.grad is not None])
    assert {"on_before_backward", "on_after_backward", "on_before_optimizer_step"} <= looks.seen.keys()
    for name, moments in looks.seen.items():
        for gradients in moments:
            shown = [gradient for gradient in gradients if gradient is not None]
            private_ones = any(shown and all(map(torch.equal, shown, step)) for step in by_step)
            assert not shown or private_ones, name
    assert all(g is None for moment in looks.seen["on_after_backward"] for g in moment)
    assert all(g is None for moment in looks.seen["on_before_optimizer_step"] for g in moment)
    assert len(released) == 4


class Without(Dataset[Any]):
    """Records whose first one is far away, or replaced by zeros that have no gradient."""

    def __init__(self, gone: bool) -> None:
        self.x, self.y = records(8).tensors
        self.x[0] = 0.0 if gone else 1e4
        self.gone = gone

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[index], self.y[index], torch.tensor(float(not (self.gone and index == 0)))


class Weighted(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, weight = batch
        return nn.functional.cross_entropy(self.head(self.body(x)), y, reduction="none") * weight

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("clipping", ["abadi", "auto-v", "global"])
def test_removing_a_record_moves_the_step_by_at_most_its_threshold(clipping: str, tmp_path: Path) -> None:
    """A batch that has every record: weights after one step differ by at most threshold / batch, the noise being equal."""
    weights = []
    for gone in (False, True):
        torch.manual_seed(1)
        module, callback = Weighted(dropout=0.0), PrivateTraining(privacy(clipping=clipping))
        data = DataLoader(Without(gone), batch_size=8)
        trainer(tmp_path, callback, max_steps=1, max_epochs=-1, accumulate_grad_batches=1).fit(module, data)
        weights.append(nn.utils.parameters_to_vector(module.parameters()).detach())
    moved = float((weights[0] - weights[1]).norm()) * 8
    assert moved <= 1.0 + 1e-5
    assert clipping == "global" or moved > 0.5


def test_the_users_loader_is_taken_over(tmp_path: Path) -> None:
    """Its collate function and its workers; and an empty batch is a step like any other, without a training_step."""

    class Rare(Classifier):
        sizes: list[int]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.sizes.append(len(batch[0]))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert len(batch[0])
            return super().training_step(batch, batch_idx)

    calls = []

    def collate(items: list[Any]) -> list[Tensor]:
        calls.append(len(items))
        return [torch.stack(column) for column in zip(*items, strict=True)]

    module, callback = Rare(), PrivateTraining(privacy())
    module.sizes = []
    trainer(tmp_path, callback, max_steps=12, max_epochs=-1).fit(module, loader(1, collate_fn=collate))
    assert calls
    assert 0 in module.sizes
    assert len(module.sizes) == 12
    assert callback.private is not None
    assert callback.private.steps_taken == 12


def test_a_length_is_the_one_that_schedulers_are_told(tmp_path: Path) -> None:
    """`estimated_stepping_batches` asks for the loader before the run is made."""

    class OneCycle(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(steps))
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module, callback = OneCycle(), PrivateTraining(privacy())
    train = trainer(tmp_path, callback, max_epochs=2)
    train.fit(module, loader())
    assert train.estimated_stepping_batches == 2 * RECORDS // BATCH
    assert callback.private is not None
    assert callback.private.steps_taken == callback.private.plan.steps == 2 * RECORDS // BATCH


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"limit_train_batches": 2, "max_epochs": 3}, 6),
        ({"limit_train_batches": 0.5, "max_epochs": 2}, 6),
        ({"limit_train_batches": 0.6, "max_epochs": 2}, 6),
        ({"limit_train_batches": 0.99, "max_epochs": 2}, 10),
        ({"limit_train_batches": 100, "max_epochs": 2}, 12),
        ({"limit_train_batches": 2, "max_epochs": 3, "max_steps": 5}, 5),
        ({"limit_train_batches": 2, "max_epochs": 3, "max_steps": 50}, 6),
        ({"max_epochs": 3, "max_steps": 7}, 7),
        ({"fast_dev_run": 2}, 2),
    ],
)
def test_the_budget_covers_what_the_trainer_is_set_to(options: dict[str, Any], steps: int, tmp_path: Path) -> None:
    _, callback = fit(tmp_path, **options)
    assert callback.private is not None
    assert callback.private.steps_taken == callback.private.plan.steps == steps


@pytest.mark.parametrize("options", [{"max_epochs": -1}, {"max_epochs": 1}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_secret_number_of_records_does_not_decide_the_length(options: dict[str, Any], tmp_path: Path) -> None:
    seen = []
    for size in (RECORDS, RECORDS - 1, 6):
        callback = PrivateTraining(
            privacy(neighbours="add-remove", sample_rate=0.25), ledger=tmp_path / f"{size}.jsonl"
        )
        fitted = trainer(tmp_path, callback, **({"max_steps": 5} | options))
        fitted.fit(Classifier(), DataLoader(records(size), batch_size=BATCH))
        assert callback.private is not None
        plan = callback.private.plan
        seen.append((plan.to_dict(), fitted.num_training_batches, fitted.current_epoch, fitted.global_step))
    assert seen[0] == seen[1] == seen[2]
    assert (plan.dataset_size, plan.steps, callback.private.steps_taken) == (None, 5, 5)


def test_epochs_have_no_length_where_the_number_of_records_is_secret(tmp_path: Path) -> None:
    callback = PrivateTraining(privacy(neighbours="add-remove", sample_rate=0.25))
    with pytest.raises(clipless.InvalidArgument, match="give max_steps= in place of epochs"):
        trainer(tmp_path, callback, max_epochs=2).fit(Classifier(), loader())


def test_bfloat16_autocast_trains(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, callback = fit(tmp_path, module=RecordClassifier(), precision="bf16-mixed", max_steps=3, max_epochs=-1)
    assert callback.private is not None
    assert callback.private.steps_taken == 3
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in module.parameters())


def test_stopping_by_a_validation_metric_is_allowed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, callback = Classifier(), PrivateTraining(privacy())
    stop = EarlyStopping(monitor="val_loss", patience=0, min_delta=100.0)
    train = trainer(tmp_path, callback, stop, max_epochs=5)
    train.fit(module, loader(), DataLoader(records(), batch_size=16))
    assert callback.private is not None
    assert callback.private.steps_taken == 2 * RECORDS // BATCH < callback.private.plan.steps
    assert float(train.callback_metrics["epsilon"]) == pytest.approx(callback.spent().epsilon)
    with pytest.raises(clipless.Misuse, match="has trained already"):
        train.fit(module, loader())


def test_averages_of_weights_cost_nothing(tmp_path: Path) -> None:
    """And the weights are those of the run, averaged, as the callback finds them when epochs start."""
    seen: list[Tensor] = []

    class Keeps(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            seen.append(nn.utils.parameters_to_vector(module.parameters()).detach().clone())

    average = StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=2)
    module, callback = fit(tmp_path, Keeps(), average, max_epochs=3)
    assert callback.spent().steps == 18
    averaged = nn.utils.parameters_to_vector(module.parameters()).detach()
    torch.testing.assert_close(averaged, (seen[1] + seen[2]) / 2)


def test_the_trainer_validates_before_and_after(tmp_path: Path) -> None:
    module, callback = Classifier(), PrivateTraining(privacy())
    train, validation = trainer(tmp_path, callback), DataLoader(records(), batch_size=16)
    (before,) = train.validate(module, validation, verbose=False)
    train.fit(module, loader(), validation)
    (after,) = train.validate(module, validation, verbose=False)
    assert callback.spent().steps == 6
    assert before["val_loss"] != after["val_loss"]


def test_time_ends_a_run_that_has_spent_less(tmp_path: Path) -> None:
    _, callback = fit(tmp_path, max_time="00:00:00:00")
    assert callback.private is not None
    assert callback.spent().steps < callback.private.plan.steps


def test_the_data_of_a_data_module_are_taken(tmp_path: Path) -> None:
    class Data(pl.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.data = TensorDataset(*records().tensors)

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.data, batch_size=BATCH)

    torch.manual_seed(1)
    module, callback = Classifier(), PrivateTraining(privacy())
    trainer(tmp_path, callback, max_steps=3, max_epochs=-1).fit(module, datamodule=Data())
    assert same_weights(module, by_hand(3)[0])
