"""`training_step`, with the transfer of the batch before it, is the function from batch to losses: checked as a whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_runs import QUIET, Classifier, fit, loader, privacy, records, same_weights, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import clipless
from clipless.integrations.lightning import PrivateTraining

pytestmark = [
    pytest.mark.filterwarnings(text) for text in (*QUIET, "ignore:.*was not logged.*", "ignore:.*not private.*")
]


class Hardest(Classifier):
    """Adds the distance to the nearest record of another class."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        vectors = self.body(batch[0])
        apart = torch.cdist(vectors, vectors.detach()) + 1e3 * (batch[1].unsqueeze(1) == batch[1])
        return nn.functional.cross_entropy(self.head(vectors), batch[1], reduction="none") - 0.1 * apart.amin(1)


class Queue(Classifier):
    """Compares with the records of earlier batches."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.kept = [torch.zeros(6)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        vectors = self.body(batch[0])
        before = torch.stack(self.kept).mean(0)
        self.kept = [*self.kept[-2:], vectors.detach().mean(0)]
        return (vectors - before).square().sum(1) + super().training_step(batch, batch_idx)


class MixUp(Classifier):
    """Mixes the records on their way to the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        share = torch.rand(len(x), 1)
        return share * x + (1 - share) * x.roll(1, 0), y


class Centred(Classifier):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] - batch[0].mean(0), batch[1]


class Outside(Classifier):
    """Has weights that are no part of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [nn.Parameter(torch.ones(3))]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.head(self.body(batch[0])) * self.kept[0]
        return nn.functional.cross_entropy(out, batch[1], reduction="none")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Hardest, "test_lightning_function.*mixes records"),
        (Queue, "test_lightning_function.*keeps something"),
        (MixUp, "mixes records"),
        (Centred, "mixes records"),
        (Outside, r"a parameter of shape \(3,\), which requires a gradient"),
    ],
)
def test_what_breaks_the_promise_between_batch_and_losses_is_refused(
    made: type[Classifier], message: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    module, callback = made(), PrivateTraining(privacy())
    before = nn.utils.parameters_to_vector(module.parameters()).clone()
    with pytest.raises(clipless.Misuse, match=message):
        trainer(tmp_path, callback).fit(module, loader())
    assert torch.equal(before, nn.utils.parameters_to_vector(module.parameters()))
    assert callback.private is not None
    assert callback.private.ledger.steps == 0


class Augmented(Classifier):
    """Adds noise to every record by itself, on its way to the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]


class InADictionary(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "mean": batch[0].mean()}


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (Augmented, {}),
        (InADictionary, {}),
        (Classifier, {"precision": "bf16-mixed"}),
        (Classifier, {"precision": "64-true"}),
        (Classifier, {"accumulate_grad_batches": 2}),
    ],
)
def test_what_every_record_has_for_itself_is_trained(
    made: type[Classifier], options: dict[str, Any], tmp_path: Path
) -> None:
    _, callback = fit(tmp_path, module=made(), **options)
    assert callback.private is not None
    assert callback.private.steps_taken == callback.private.plan.steps >= 3


def unmasked(samples: list[Any]) -> list[Tensor]:
    """Sums over as many numbers as the longest record has."""
    longest = max(int(y) + 2 for _, y in samples)
    return [torch.stack([x * longest for x, _ in samples]), torch.stack([y for _, y in samples])]


def test_a_collate_function_that_tells_of_other_records_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(1)
    data: DataLoader[Any] = DataLoader(records(), batch_size=8, collate_fn=unmasked)
    with pytest.raises(clipless.Misuse, match="collated alone"):
        trainer(tmp_path, PrivateTraining(privacy())).fit(Classifier(), data)


class Counting(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("steps", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def test_checks_log_nothing_and_change_nothing(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, callback = Counting(), PrivateTraining(privacy(), log_not_private=True)
    made = trainer(tmp_path, callback, max_epochs=1)
    made.fit(module, loader())
    assert float(made.callback_metrics["steps"]) == 6
    assert same_weights(module, fit(tmp_path / "other")[0])
