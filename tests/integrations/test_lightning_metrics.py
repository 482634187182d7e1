"""What is logged while training reaches no logger, progress bar, scheduler or callback."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_runs import QUIET, Classifier, loader, privacy, trainer
from torch import Tensor

from clipless.integrations.lightning import PrivateTraining

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]


class Logs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss.mean(), prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("late_loss", outputs["loss"].mean())


def test_training_metrics_reach_no_one(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="log")
    callback = PrivateTraining(privacy())
    train = trainer(tmp_path, callback, LearningRateMonitor(), max_epochs=1, logger=logger, log_every_n_steps=1)
    with pytest.warns(UserWarning, match="was not logged") as told:
        train.fit(Logs(), loader())
    names = [str(warning.message).split("'")[1] for warning in told if "was not logged" in str(warning.message)]
    assert sorted(names) == ["late_loss", "train_loss"]
    seen = {*train.callback_metrics, *train.logged_metrics, *train.progress_bar_metrics}
    assert not [name for name in seen if "loss" in name]
    assert "loss" not in Path(logger.log_dir, "metrics.csv").read_text()
    assert "epsilon" in seen


def test_training_metrics_are_logged_if_asked_for(tmp_path: Path) -> None:
    callback = PrivateTraining(privacy(), log_not_private=True)
    train = trainer(tmp_path, callback, max_epochs=1)
    with pytest.warns(UserWarning, match="is not private"):
        train.fit(Logs(), loader())
    assert "train_loss_epoch" in train.callback_metrics


def test_a_scheduler_cannot_follow_the_training_loss(tmp_path: Path) -> None:
    class Plateau(Logs):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss"}}

    train = trainer(tmp_path, PrivateTraining(privacy()), max_epochs=2)
    with pytest.warns(UserWarning, match="was not logged"), pytest.raises(Exception, match="not available"):
        train.fit(Plateau(), loader())


def test_nothing_is_stopped_or_kept_by_the_training_loss(tmp_path: Path) -> None:
    stop = trainer(tmp_path, PrivateTraining(privacy()), EarlyStopping("train_loss"), max_epochs=2)
    with pytest.warns(UserWarning, match="was not logged"), pytest.raises(RuntimeError, match="not available"):
        stop.fit(Logs(), loader())
    best = ModelCheckpoint(tmp_path / "best", monitor="train_loss")
    keep = trainer(tmp_path, PrivateTraining(privacy()), best, enable_checkpointing=True)
    with pytest.warns(UserWarning, match="was not logged"), pytest.warns(UserWarning, match="could not find"):
        keep.fit(Logs(), loader())
    assert best.best_model_score is None
    assert not list((tmp_path / "best").glob("*"))
