"""Losses per record are the models' own: what each model returns for that record alone."""

from pathlib import Path
from typing import Any

import hf_problems as hf
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

import clipless
from clipless.integrations.transformers import PrivateTrainer
from clipless.integrations.transformers.losses import decoder_inputs, record_losses, split_labels

B, T = 3, 7


def bert(kind: str, **more: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=hf.VOCABULARY, max_position_embeddings=16, **sizes, **more)
    return getattr(transformers, f"BertFor{kind}")(config)


def tokens(ignored: bool = True) -> Tensor:
    """Labels of every token, of which the first two records have fewer than the third, the padding being ignored."""
    labels = torch.randint(0, 3, (B, T))
    if ignored:
        labels[0, 3:], labels[1, :2] = -100, -100
    return labels


def text(*shape: int) -> dict[str, Tensor]:
    mask = torch.ones(B, *shape[:-1], shape[-1], dtype=torch.long)
    mask[0, ..., 4:] = 0
    return {"input_ids": torch.randint(1, hf.VOCABULARY, (B, *shape)), "attention_mask": mask}


CASES: dict[str, tuple[Any, Any]] = {
    "classes": (lambda: bert("SequenceClassification", num_labels=4), lambda: {"labels": torch.tensor([0, 3, 1])}),
    "one number": (lambda: bert("SequenceClassification", num_labels=1), lambda: {"labels": torch.randn(B)}),
    "numbers": (
        lambda: bert("SequenceClassification", num_labels=2, problem_type="regression"),
        lambda: {"labels": torch.randn(B, 2)},
    ),
    "several labels": (
        lambda: bert("SequenceClassification", num_labels=4),
        lambda: {"labels": torch.randint(0, 2, (B, 4)).float()},
    ),
    "tokens": (lambda: bert("TokenClassification", num_labels=3), lambda: {"labels": tokens()}),
    "masked": (lambda: bert("MaskedLM"), lambda: {"labels": tokens()}),
    "answers": (
        lambda: bert("QuestionAnswering"),
        lambda: {"start_positions": torch.tensor([0, 2, 1]), "end_positions": torch.tensor([3, 6, 4])},
    ),
    "next token": (hf.gpt2, lambda: {"labels": tokens()}),
    "translation": (hf.t5, lambda: {"labels": tokens()}),
    "prefix": (hf.prefix, lambda: {"labels": tokens()}),
    "choices": (lambda: bert("MultipleChoice"), lambda: {"labels": torch.tensor([0, 3, 1])}),
}


def losses_of(model: nn.Module, inputs: dict[str, Tensor], **more: Any) -> Tensor:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    given, labels = split_labels(inputs)
    return record_losses(base, model(**decoder_inputs(base, given, labels)), labels, **more)


@pytest.mark.parametrize("name", CASES)
def test_a_records_loss_is_what_the_model_returns_for_it_alone(name: str) -> None:
    make, labels = CASES[name]
    torch.manual_seed(0)
    model = make().eval()
    inputs = {**text(*((4, T) if name == "choices" else (T,))), **labels()}
    ours = losses_of(model, dict(inputs))
    assert ours.shape == (B,)
    alone = [model(**{key: value[n : n + 1] for key, value in inputs.items()}).loss for n in range(B)]
    assert torch.allclose(ours, torch.stack(alone), atol=1e-6)


@pytest.mark.parametrize("name", ["classes", "tokens", "next token"])
def test_smoothed_labels_are_those_of_the_trainer_record_by_record(name: str) -> None:
    make, labels = CASES[name]
    torch.manual_seed(0)
    model = make().eval()
    inputs = {**text(T), **labels()}
    ours = losses_of(model, dict(inputs), smoothing=0.2)
    for n in range(B):
        alone = {key: value[n : n + 1] for key, value in inputs.items()}
        own = LabelSmoother(0.2)(model(**alone), alone["labels"], shift_labels=name == "next token")
        assert torch.allclose(ours[n], own, atol=1e-6)


def test_positions_outside_the_text_are_ignored() -> None:
    torch.manual_seed(0)
    model = bert("QuestionAnswering").eval()
    inside = {"start_positions": torch.tensor([0, 2, 1]), "end_positions": torch.tensor([3, 6, 4])}
    outside = {**inside, "end_positions": torch.tensor([3, 6, 9])}
    inputs = text(T)
    both, one = losses_of(model, {**inputs, **inside}), losses_of(model, {**inputs, **outside})
    start = nn.functional.cross_entropy(model(**inputs).start_logits[2:], inside["start_positions"][2:])
    assert torch.equal(both[:2], one[:2])
    assert torch.allclose(one[2], start / 2)


def test_a_record_without_labels_has_no_loss() -> None:
    torch.manual_seed(0)
    losses = losses_of(hf.gpt2().eval(), {**text(T), "labels": torch.full((B, T), -100)})
    assert losses.tolist() == [0.0] * B


class Weighted(transformers.BertForSequenceClassification):
    """A loss of its own, that weighs classes."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        outputs = super().forward(input_ids, attention_mask)
        if labels is not None:
            outputs["loss"] = nn.functional.cross_entropy(outputs.logits, labels) * (1 + labels.float().mean()) * 2
        return outputs


@pytest.mark.parametrize("broken", ["other loss", "no loss", "no label"])
def test_a_loss_that_is_not_known_is_refused_before_training(broken: str, tmp_path: Path) -> None:
    model, records, remedy = hf.bert(), hf.texts(), "compute_loss_func"
    if broken == "other loss":
        model = Weighted(model.config)
    elif broken == "no loss":
        records = [{name: value for name, value in record.items() if name != "labels"} for record in records]
    else:
        model, remedy = hf.gpt2(), "none of the first records"
        records = [{**record, "labels": [-100] * len(record["input_ids"])} for record in records]
    privacy = clipless.Privacy(**hf.PLAN)
    given = {"train_dataset": records, "data_collator": hf.collate, "privacy": privacy}
    trainer = PrivateTrainer(model, hf.arguments(tmp_path), **given)
    before = hf.weights_of(model)
    with pytest.raises(clipless.InvalidArgument, match=remedy):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in hf.weights_of(model).items())
    assert not (tmp_path / "ledger.jsonl").exists()
