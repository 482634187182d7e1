"""What would break the promise of Trainer.fit is refused, with the remedy."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.tuner import Tuner
from lightning_runs import QUIET, Classifier, MeanClassifier, RecordClassifier, fit, loader, privacy, records, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler

import clipless
from clipless.integrations.lightning import PrivateTraining
from clipless.integrations.lightning.refusals import refuse_callbacks, refuse_strategy

pytestmark = [pytest.mark.filterwarnings(text) for text in (*QUIET, "ignore:`training_step` returned `None`")]


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ClipsItself(Classifier):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        pass


class Fetches(Classifier):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        raise AssertionError


class Vector(MeanClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")


class OwnBackward(Classifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.sum().backward()


class InParts(MeanClassifier):
    """The mean of what its parts return, between which anything might happen."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.criterion(self.head(self.body(batch[0])), batch[1])


class SkipsSteps(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx else super().training_step(batch, batch_idx)


class SkipsEpochs(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


class Mixes(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.body(batch[0])
        return nn.functional.cross_entropy(self.head(hidden - hidden.mean(0)), batch[1], reduction="none")


class WithBatchNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.body.append(nn.BatchNorm1d(6))


class WithFixedBatchNorm(Classifier):
    """Allowed by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(nn.BatchNorm1d(6).eval().requires_grad_(False))


def by_time() -> ModelCheckpoint:
    return ModelCheckpoint(train_time_interval=timedelta(minutes=10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val"),
        ({"plugins": [MixedPrecision("16-mixed", "cpu")]}, "bf16-mixed"),
        ({"overfit_batches": 2}, "overfit_batches"),
        ({"detect_anomaly": True}, "detect_anomaly"),
        ({"max_epochs": -1}, "without end"),
        ({"limit_train_batches": 3, "accumulate_grad_batches": 2}, "multiple"),
        ({"accumulate_grad_batches": 100}, "accumulate_grad_batches"),
        ({"accumulate_grad_batches": 2, "max_time": "00:01:00:00"}, "max_steps"),
        ({"accumulate_grad_batches": 2, "others": by_time, "enable_checkpointing": True}, "every_n_train_steps"),
        ({"accumulate_grad_batches": 2, "val_check_interval": 1, "validation": True}, "multiple of accumulate"),
        ({"module": Manual}, "automatic_optimization"),
        ({"module": ClipsItself}, "configure_gradient_clipping"),
        ({"module": Fetches}, "batch_idx"),
        ({"module": Vector}, "leave loss_reduction out"),
        ({"module": MeanClassifier, "how": {"loss_reduction": None}}, "reduction='none'"),
        ({"module": OwnBackward}, "has its own backward"),
        ({"module": InParts}, "'body' was called, and not the model"),
        ({"module": SkipsSteps}, "without its backward"),
        ({"module": SkipsEpochs, "max_epochs": 2}, "drawn and not stepped"),
        ({"module": WithBatchNorm}, "GroupNorm"),
        ({"module": WithFixedBatchNorm, "others": lambda: StochasticWeightAveraging(0.1)}, "further epoch"),
        ({"precision": "bf16-mixed", "module": MeanClassifier}, "Leave loss_reduction out"),
        ({"limit_train_batches": 0}, "no step"),
        ({"others": LearningRateFinder}, "clipless tune"),
        ({"others": lambda: ThroughputMonitor(len), "logger": True}, "number of records drawn"),
        ({"others": DeviceStatsMonitor, "logger": True}, "number of records drawn"),
        ({"others": SpikeDetection}, "EarlyStopping on a validation metric"),
        ({"others": lambda: GradientAccumulationScheduler({0: 2})}, "accumulate_grad_batches"),
    ],
)
def test_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    made = options.pop("module", Classifier)()
    others = [options.pop("others")()] if "others" in options else []
    with pytest.raises(clipless.CliplessError, match=message):
        fit(tmp_path, *others, module=made, **options)


def test_records_that_mix_between_two_modules_are_refused_before_anything_is_released(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, callback = Mixes(dropout=0.0), PrivateTraining(privacy())
    before = nn.utils.parameters_to_vector(module.parameters()).clone()
    with pytest.raises(clipless.CliplessError):
        trainer(tmp_path, callback).fit(module, loader())
    assert torch.equal(before, nn.utils.parameters_to_vector(module.parameters()))


def test_a_search_for_the_learning_rate_is_refused(tmp_path: Path) -> None:
    train = trainer(tmp_path, PrivateTraining(privacy()))
    with pytest.raises(clipless.Misuse, match="clipless tune"):
        Tuner(train).lr_find(Classifier(), train_dataloaders=loader())


def test_a_search_by_the_tuner_for_the_batch_size_is_refused(tmp_path: Path) -> None:
    class Sized(Classifier):
        batch_size = 4

        def train_dataloader(self) -> DataLoader[Any]:
            return loader(self.batch_size)

    train = trainer(tmp_path, PrivateTraining(privacy()))
    with pytest.raises(clipless.Misuse, match="clipless tune"):
        Tuner(train).scale_batch_size(Sized())


def test_a_search_for_the_batch_size_is_refused() -> None:
    with pytest.raises(clipless.Misuse, match="clipless tune"):
        refuse_callbacks([BatchSizeFinder()], Classifier())


def test_other_strategies_are_refused() -> None:
    with pytest.raises(clipless.Misuse, match="FSDPStrategy is not supported"):
        refuse_strategy(FSDPStrategy(parallel_devices=[torch.device("cpu")]))


@pytest.mark.parametrize(
    "data",
    [
        [loader(), loader()],
        {"a": loader()},
        DataLoader(records(), batch_size=8, sampler=WeightedRandomSampler([1.0] * 48, 48)),
        DataLoader(records(), batch_size=None),
    ],
)
def test_other_data_are_refused(data: Any, tmp_path: Path) -> None:
    with pytest.raises(clipless.CliplessError):
        trainer(tmp_path, PrivateTraining(privacy())).fit(Classifier(), data)


def test_losses_of_records_need_a_private_run(tmp_path: Path) -> None:
    with pytest.raises(clipless.Misuse, match="add PrivateTraining"):
        trainer(tmp_path).fit(RecordClassifier(), loader())


def test_arguments_are_those_of_privacy() -> None:
    with pytest.raises(clipless.InvalidType, match="clipless.Privacy"):
        PrivateTraining(3.0)  # type: ignore[arg-type]
    with pytest.raises(clipless.Misuse, match="trainer.fit"):
        PrivateTraining(privacy()).spent()


def test_a_second_callback_is_refused(tmp_path: Path) -> None:
    class Other(PrivateTraining):
        pass

    with pytest.raises(clipless.CliplessError):
        fit(tmp_path, Other(privacy()))


def test_a_plain_optimizer_step_in_a_hook_is_refused(tmp_path: Path) -> None:
    class Twice(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *rest: Any) -> None:
            torch.optim.SGD(module.parameters(), lr=0.1).step()

    with pytest.raises(clipless.Misuse):
        fit(tmp_path, Twice())
