"""A run that is resumed through Trainer.fit(ckpt_path=...) ends as one that was not interrupted."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import BATCH, QUIET, Classifier, MeanClassifier, loader, privacy, records, same_weights, trainer
from torch.utils.data import DataLoader

import clipless
from clipless.integrations.lightning import PrivateTraining

pytestmark = [
    *[pytest.mark.filterwarnings(text) for text in QUIET],
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended.*"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided.*"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed.*"),
]


def train(
    folder: Path,
    path: Path | None = None,
    seed: int = 1,
    how: Any = None,
    settings: Any = None,
    batch_size: int = BATCH,
    **options: Any,
) -> tuple[Classifier, PrivateTraining]:
    """Two epochs of 6 steps with Poisson batches, a validation after each, and a checkpoint every `every` steps."""
    torch.manual_seed(seed)
    module, callback = Classifier(), PrivateTraining(privacy(**(settings or {})), **(how or {}))
    checkpoints = ModelCheckpoint(
        folder / "kept", filename="{step}", save_top_k=-1, every_n_train_steps=2, auto_insert_metric_name=False
    )
    options = {"max_epochs": 2, "enable_checkpointing": True} | options
    made = trainer(folder, callback, checkpoints, **options)
    made.fit(module, loader(batch_size), DataLoader(records(), batch_size=16), ckpt_path=path)
    return module, callback


@pytest.mark.parametrize("clipping", ["auto-s", "dc-p"])
@pytest.mark.parametrize("step", [2, 4, 6, 8])
def test_resumed_in_and_after_an_epoch(clipping: str, step: int, tmp_path: Path) -> None:
    """All later steps are lost and repeated: the ledger allows it because each releases what it released before."""
    whole, callback = train(tmp_path, settings={"clipping": clipping})
    again, resumed = train(tmp_path, tmp_path / "kept" / f"{step}.ckpt", seed=77, settings={"clipping": clipping})
    assert same_weights(whole, again)
    assert callback.private is not None
    assert resumed.private is not None
    assert resumed.private.ledger == callback.private.ledger
    assert resumed.private.steps_taken == 12
    assert torch.equal(resumed.private.thresholds, callback.private.thresholds)
    (ledger,) = (tmp_path / "ledgers").iterdir()
    assert clipless.read_ledger(ledger).recorded().steps == 12


@pytest.mark.parametrize("step", [2, 4])
def test_resumed_with_batches_in_parts(step: int, tmp_path: Path) -> None:
    """The checkpoint of its last step is not written again after the first part of the next batch."""
    parts = {"accumulate_grad_batches": 2, "max_epochs": 1, "batch_size": BATCH // 2}
    whole, callback = train(tmp_path, **parts)
    path = tmp_path / "kept" / f"{step}.ckpt"
    written = path.stat().st_mtime_ns
    again, resumed = train(tmp_path, path, seed=77, **parts)
    assert path.stat().st_mtime_ns == written
    assert same_weights(whole, again)
    assert callback.private is not None
    assert resumed.private is not None
    assert resumed.private.ledger == callback.private.ledger
    assert resumed.private.steps_taken == 6


class Killed(Exception):
    pass


class Dies(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 5:
            raise Killed
        return super().training_step(batch, batch_idx)


def interrupted(tmp_path: Path, **how: Any) -> tuple[Classifier, PrivateTraining]:
    """Five steps, of which the last is in the ledger alone, and a run that goes on from there."""

    def run(kind: type[Classifier], path: Path | None, **how: Any) -> tuple[Classifier, PrivateTraining]:
        torch.manual_seed(1)
        module, callback = kind(), PrivateTraining(privacy(), ledger=tmp_path / "ledger.jsonl", **how)
        made = trainer(
            tmp_path, callback, ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=2, save_top_k=1),
            max_epochs=2, enable_checkpointing=True,
        )  # fmt: skip
        made.fit(module, loader(), ckpt_path=path)
        return module, callback

    with pytest.raises(Killed):
        run(Dies, None)
    return run(Classifier, tmp_path / "last.ckpt", **how)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    module, callback = interrupted(tmp_path)
    expected, _ = train(tmp_path / "reference", limit_val_batches=0)
    assert callback.private is not None
    assert callback.private.steps_taken == 12
    assert same_weights(module, expected)


def test_a_run_with_new_noise_ends_as_much_earlier_as_steps_were_lost(tmp_path: Path) -> None:
    module, callback = interrupted(tmp_path, reseed=True)
    expected, _ = train(tmp_path / "reference", limit_val_batches=0)
    assert callback.spent().steps == 12
    assert not same_weights(module, expected)


def test_other_gradients_under_the_same_noise_are_refused(tmp_path: Path) -> None:
    """A second run from one checkpoint with other losses would show the difference of two gradients."""
    train(tmp_path)

    class Other(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return super().training_step((x, (y + 1) % 3), batch_idx)

    callback = PrivateTraining(privacy())
    with pytest.raises(clipless.ReplayDiffers):
        trainer(tmp_path, callback, max_epochs=2).fit(Other(), loader(), ckpt_path=tmp_path / "kept" / "4.ckpt")
    assert callback.spent().steps == 12


def test_other_plans_and_plain_checkpoints_are_refused(tmp_path: Path) -> None:
    train(tmp_path)
    path = tmp_path / "kept" / "4.ckpt"
    with pytest.raises(clipless.InvalidArgument, match="another plan"):
        train(tmp_path / "other", path, max_epochs=3)
    with pytest.raises(clipless.InvalidArgument, match="ledger"):
        train(tmp_path / "other", path, how={"ledger": tmp_path / "missing.jsonl"})
    plain = trainer(tmp_path, max_epochs=1)
    plain.fit(MeanClassifier(), loader())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(clipless.Misuse, match="no private run"):
        train(tmp_path / "other", tmp_path / "plain.ckpt")


def test_a_checkpoint_without_a_ledger_is_refused(tmp_path: Path) -> None:
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
            trainer.save_checkpoint(tmp_path / "early.ckpt")

    with pytest.raises(clipless.Misuse, match="ledger on disk"):
        trainer(tmp_path, PrivateTraining(privacy()), Saves()).fit(Classifier(), loader())


def test_a_run_that_has_ended_leaves_weights_without_keys(tmp_path: Path) -> None:
    callback, module = PrivateTraining(privacy()), Classifier()
    made = trainer(tmp_path, callback)
    made.fit(module, loader())
    made.save_checkpoint(tmp_path / "late.ckpt")
    saved = torch.load(tmp_path / "late.ckpt")
    assert "PrivateTraining" not in saved["callbacks"]
    assert all(torch.equal(saved["state_dict"][name], value) for name, value in module.state_dict().items())
    assert callback.spent().steps == 6
    module.zero_grad()
    module.training_step(next(iter(loader())), 0).sum().backward()
    assert all(p.grad is not None for p in module.parameters()), "an ordinary module again"
    with pytest.raises(clipless.Misuse, match="no private run"):
        train(tmp_path / "other", tmp_path / "late.ckpt")


def test_evaluation_of_a_checkpoint_leaves_the_run_alone(tmp_path: Path) -> None:
    module, callback = train(tmp_path)
    assert callback.private is not None
    before = callback.private.ledger.steps
    made = trainer(tmp_path, callback)
    made.validate(module, DataLoader(records(), batch_size=16), ckpt_path=tmp_path / "kept" / "4.ckpt", verbose=False)
    assert callback.private.ledger.steps == before
