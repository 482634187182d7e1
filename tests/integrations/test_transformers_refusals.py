"""What breaks the promise of a private Trainer is refused when it is made, with the remedy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hf_problems as hf
import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

import clipless
from clipless.integrations.transformers import PrivateTrainer

PRIVACY = clipless.Privacy(**hf.PLAN)
PROBLEM = hf.PROBLEMS["bert"]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_grad_norm": 0.5}, "clipping= of Privacy"),
    ({"train_sampling_strategy": "group_by_length"}, "Poisson"),
    ({"train_sampling_strategy": "sequential"}, "Poisson"),
    ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
    ({"torch_compile": True}, "leave it out"),
    ({"neftune_noise_alpha": 5.0}, "padded length"),
    ({"use_liger_kernel": True}, "averages over the batch"),
    ({"optim": "lomo"}, "adamw_torch"),
    ({"optim": "galore_adamw_layerwise"}, "adamw_torch"),
    ({"include_num_input_tokens_seen": "all"}, "not private"),
    ({"skip_memory_metrics": False}, "not private"),
    ({"debug": "underflow_overflow"}, "not private"),
    ({"enable_jit_checkpoint": True}, "save_strategy"),
    ({"push_to_hub": True, "hub_strategy": "all_checkpoints"}, "keys of the noise"),
    ({"push_to_hub": True, "hub_strategy": "checkpoint"}, "keys of the noise"),
]


@pytest.fixture(autouse=True)
def _no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """TrainingArguments tell Accelerate of some settings through the environment."""
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def make(folder: Path, made: type[PrivateTrainer] = PrivateTrainer, **more: Any) -> PrivateTrainer:
    model = PROBLEM.make()
    settings = {"lr_scheduler_type": "constant", **more.pop("settings", {})}
    given = {"train_dataset": PROBLEM.records, "data_collator": hf.collate, "privacy": PRIVACY, **more}
    return made(model, hf.arguments(folder, **settings), optimizers=(hf.optimizer_for(model), None), **given)


@pytest.mark.parametrize(("settings", "remedy"), REFUSED, ids=[str(settings) for settings, _ in REFUSED])
def test_a_setting_that_breaks_the_promise_is_refused(settings: dict[str, Any], remedy: str, tmp_path: Path) -> None:
    with pytest.raises(clipless.InvalidArgument, match=remedy) as refused:
        make(tmp_path, settings=settings)
    assert str(refused.value).startswith(tuple(settings))


def test_noise_for_embeddings_is_refused_where_the_trainer_got_it_later(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.neftune_noise_alpha = 5.0
    with pytest.raises(clipless.InvalidArgument, match="padded length"):
        trainer.train()


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("fp16", True, "bf16=True"),
        ("deepspeed", "zero.json", "torchrun"),
        ("fsdp", "full_shard", "torchrun"),
        ("parallelism_config", object(), "torchrun"),
    ],
)
def test_what_this_machine_cannot_set_up_is_refused_all_the_same(
    name: str, value: Any, remedy: str, tmp_path: Path
) -> None:
    arguments = hf.arguments(tmp_path)
    vars(arguments)[name] = value
    with pytest.raises(clipless.InvalidArgument, match=remedy):
        PrivateTrainer(PROBLEM.make(), arguments, train_dataset=PROBLEM.records, privacy=PRIVACY)


@pytest.mark.parametrize(
    ("name", "value"),
    [("include_num_input_tokens_seen", "all"), ("skip_memory_metrics", False), ("auto_find_batch_size", True)],
)
def test_a_setting_that_is_changed_later_is_refused_as_well(name: str, value: Any, tmp_path: Path) -> None:
    trainer = make(tmp_path)
    vars(trainer.args)[name] = value
    with pytest.raises(clipless.InvalidArgument, match=name):
        trainer.train()
    assert trainer.private is None


def test_privacy_is_a_record_of_it(tmp_path: Path) -> None:
    with pytest.raises(clipless.InvalidType, match=r"clipless\.Privacy"):
        make(tmp_path, privacy={"epsilon": 3.0})
    with pytest.raises(TypeError, match="privacy"):
        PrivateTrainer(PROBLEM.make(), hf.arguments(tmp_path))  # type: ignore[call-arg]


def test_a_trainer_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Trainer, "_get_grad_norm")
    with pytest.raises(ImportError, match=r"transformers 5\.22"):
        make(tmp_path)


def mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels)


def own_losses(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels, reduction="none")


def coupled_losses(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses = own_losses(outputs, labels)
    return losses * torch.softmax(losses, 0)


def test_a_loss_of_ones_own_is_one_per_record(tmp_path: Path) -> None:
    with pytest.raises(clipless.InvalidArgument, match="loss is of 0 dimensions.*one loss per record"):
        make(tmp_path / "mean", compute_loss_func=mean_loss).train()
    with pytest.raises(clipless.CliplessError, match="record"):
        make(tmp_path / "coupled", compute_loss_func=coupled_losses).train()
    ends = []
    for folder, given in (("own", {"compute_loss_func": own_losses}), ("default", {})):
        trainer = make(tmp_path / folder, **given)
        trainer.train()
        ends.append(hf.weights_of(trainer.model))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


class OtherData(PrivateTrainer):
    def get_train_dataloader(self) -> Any:
        return Trainer.get_train_dataloader(self)


class OtherStep(PrivateTrainer):
    def training_step(self, *args: Any, **more: Any) -> Any:
        return Trainer.training_step(self, *args, **more)


@pytest.mark.parametrize("made", [OtherData, OtherStep])
def test_a_subclass_that_trains_in_another_way_is_refused(made: type[PrivateTrainer], tmp_path: Path) -> None:
    with pytest.raises(clipless.InvalidType, match="compute_record_losses"):
        make(tmp_path, made)


class OtherLoss(PrivateTrainer):
    def compute_loss(self, model: nn.Module, inputs: Any, *rest: Any, **more: Any) -> Any:
        return model(**inputs).loss


class Plain(Trainer):
    def compute_loss(self, *args: Any, **more: Any) -> Any:
        return 2 * super().compute_loss(*args, **more)


class Mixed(PrivateTrainer, Plain):
    pass


@pytest.mark.parametrize("made", [OtherLoss, Mixed])
def test_a_loss_of_the_whole_batch_is_refused_and_leaves_nothing(made: type[PrivateTrainer], tmp_path: Path) -> None:
    trainer = make(tmp_path, made)
    with pytest.raises(clipless.InvalidArgument, match="every record's own.*compute_record_losses"):
        trainer.train()
    assert not (tmp_path / "ledger.jsonl").exists()
    made(trainer.model, trainer.args, train_dataset=PROBLEM.records, data_collator=hf.collate, privacy=PRIVACY)
    again = make(tmp_path)
    again.train()
    assert clipless.read_ledger(tmp_path / "ledger.jsonl").ledger().steps == 3


class OwnRecordLosses(PrivateTrainer):
    """A `compute_loss` as people write it, without the mean."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = nn.functional.cross_entropy(outputs.logits, labels, torch.tensor([2.0, 2.0]), reduction="none")
        return (losses, outputs) if return_outputs else losses


def test_a_subclass_may_have_its_own_compute_loss_of_records(tmp_path: Path) -> None:
    doubled = make(tmp_path, OwnRecordLosses, eval_dataset=hf.texts(6))
    doubled.train()
    twice = hf.Problem(PROBLEM.make, PROBLEM.records, lambda model, batch: 2 * PROBLEM.losses(model, batch))
    expected, found = hf.plain_loop(twice).weights, hf.weights_of(doubled.model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    doubled.model.eval()
    with torch.no_grad():
        loss = float(2 * PROBLEM.losses(doubled.model, hf.collate(hf.texts(6))).mean())
    assert doubled.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)


class Remembering(PrivateTrainer):
    """Divides by a running mean of all losses so far."""

    scale = 1.0

    def compute_record_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        losses = super().compute_record_losses(model, inputs)
        self.scale = 0.9 * self.scale + 0.1 * float(losses.detach().mean())
        return losses / self.scale


class Criterion(PrivateTrainer):
    """Has weights of its own, which no private run noises."""

    def compute_record_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if not hasattr(self, "weights"):
            self.weights = nn.Parameter(torch.ones(2))
        labels = inputs.pop("labels")
        return nn.functional.cross_entropy(model(**inputs).logits * self.weights, labels, reduction="none")


class Centring(PrivateTrainer):
    """Calls the parts of the model by itself, with a statistic of the batch between them."""

    def compute_record_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        labels = inputs.pop("labels")
        pooled = model.bert(**inputs).pooler_output  # type: ignore[operator, union-attr]
        logits = model.classifier(pooled - pooled.detach().mean(0))  # type: ignore[operator]
        return nn.functional.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize(
    ("made", "message"),
    [(Remembering, "keeps something"), (Criterion, r"'self\.weights'"), (Centring, "mixes records")],
)
def test_the_whole_function_of_a_subclass_is_checked(made: type[PrivateTrainer], message: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, made)
    before = hf.weights_of(trainer.model)
    with pytest.raises(clipless.Misuse, match=message):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in hf.weights_of(trainer.model).items())
    assert not (tmp_path / "ledger.jsonl").exists()


class Doubled(PrivateTrainer):
    def compute_record_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return 2 * super().compute_record_losses(model, inputs)


def test_a_subclass_may_have_its_own_losses(tmp_path: Path) -> None:
    doubled = make(tmp_path, Doubled)
    doubled.train()
    twice = hf.Problem(PROBLEM.make, PROBLEM.records, lambda model, batch: 2 * PROBLEM.losses(model, batch))
    expected, once = hf.plain_loop(twice).weights, hf.plain_loop(PROBLEM).weights
    found = hf.weights_of(doubled.model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not all(torch.equal(once[name], expected[name]) for name in expected)


class Stop(TrainerCallback):
    """Ends training in the middle of a batch."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = True


def test_a_batch_that_is_dropped_is_refused(tmp_path: Path) -> None:
    with pytest.raises(clipless.Misuse, match="batch"):
        make(tmp_path, callbacks=[Stop()]).train()


def test_a_search_over_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(clipless.Misuse, match="clipless tune"):
        make(tmp_path).hyperparameter_search()


class Records(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(PROBLEM.records)


def test_data_without_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(clipless.InvalidType, match="IterableDataset"):
        make(tmp_path, train_dataset=Records()).train()
    with pytest.raises(clipless.InvalidArgument, match="train_dataset"):
        make(tmp_path, train_dataset=None).train()


def test_metrics_on_the_training_records_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="not private"):
        make(tmp_path, eval_dataset=PROBLEM.records)
