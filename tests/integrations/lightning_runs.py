"""A small Lightning module and its data, trained by the Trainer and by a loop of one's own."""

from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import clipless
from clipless.integrations.lightning import PrivateTraining, RecordLosses

RECORDS, BATCH = 48, 8

# Lightning's advice about workers, validation data and logs, and what torch says about Lightning.
QUIET = (
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.*LeafSpec.*",
    "ignore:.*Checkpoint directory .* exists and is not empty.*",
)


class Classifier(pl.LightningModule):
    """Two layers and dropout, called one after the other: no single module is the model. One loss per record."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(6, 3)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.body(x)), y, reduction="none")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", self.criterion(self(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class RecordClassifier(RecordLosses, Classifier):
    """Says so where there is no private run."""


class MeanClassifier(Classifier):
    """The mean over the batch, of what the module itself returns."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.criterion(self(x), y)


def records(count: int = RECORDS) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def loader(batch_size: int = BATCH, **options: Any) -> DataLoader[Any]:
    return DataLoader(records(), batch_size=batch_size, shuffle=True, **options)


def privacy(**changes: Any) -> clipless.Privacy:
    return clipless.Privacy(**({"noise_multiplier": 1.0, "seed": 3, "delta": 1e-3} | changes))


def trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    settings = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return pl.Trainer(callbacks=list(callbacks), **(settings | options))


def fit(
    folder: Path,
    *others: pl.Callback,
    module: pl.LightningModule | None = None,
    how: Any = None,
    validation: bool = False,
    **options: Any,
) -> tuple[pl.LightningModule, PrivateTraining]:
    """Train a fresh module; `how` are the arguments of PrivateTraining beside `privacy`."""
    torch.manual_seed(1)
    module = Classifier() if module is None else module
    callback = PrivateTraining(privacy(), **(reduction_of(module) | (how or {})))
    validated = DataLoader(records(), batch_size=16) if validation else None
    trainer(folder, callback, *others, **options).fit(module, loader(), validated)
    return module, callback


def reduction_of(module: pl.LightningModule) -> dict[str, Any]:
    return {"loss_reduction": "mean"} if isinstance(module, MeanClassifier) else {}


def by_hand(
    steps: int, module: pl.LightningModule | None = None, parts: int = 1, **changes: Any
) -> tuple[pl.LightningModule, clipless.Private]:
    """The same training in a loop of one's own, by the form that the module's losses have."""
    torch.manual_seed(1)
    module = Classifier() if module is None else module
    optimizer = module.configure_optimizers()
    private = clipless.make_private(
        module,
        optimizer,
        records(),
        **privacy(**changes).arguments(),
        **reduction_of(module),
        batch_size=BATCH,
        epochs=2,
    )
    for batch in chain(private.loader.parts(parts), private.loader.parts(parts) if steps > RECORDS // BATCH else ()):
        optimizer.zero_grad()
        for part in batch:
            if isinstance(module, MeanClassifier):
                module.training_step(part, 0).backward()
            else:
                private.accumulate(lambda model, batch: model.training_step(batch, 0), part)
        optimizer.step()
        if private.steps_taken == steps:
            break
    return module, private


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
