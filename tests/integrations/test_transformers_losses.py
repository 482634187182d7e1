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
    """Weighs classes: of one record's mean nothing of that is left."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        outputs = super().forward(input_ids, attention_mask)
        if labels is not None:
            outputs["loss"] = nn.functional.cross_entropy(outputs.logits, labels, torch.tensor([1.0, 1.02]))
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


class Tagger(transformers.PreTrainedModel):
    """Labels every token, with a last layer that may begin at zero, and returns what `order` says."""

    config_class = transformers.BertConfig

    def __init__(self, order: str = "named", zero: bool = True, shifted: bool = False, noisy: bool = False) -> None:
        super().__init__(transformers.BertConfig())
        self.words, self.last = nn.Embedding(hf.VOCABULARY, 16), nn.Linear(16, hf.VOCABULARY)
        self.order, self.shifted, self.noisy = order, shifted, noisy
        if zero:
            nn.init.zeros_(self.last.weight)
            nn.init.zeros_(self.last.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        vectors = self.words(input_ids)
        if self.noisy:  # at a level of its own for every record, as in diffusion, also in evaluation
            level = torch.rand(len(vectors), 1, 1)
            vectors = (1 - level) * vectors + level * torch.randn_like(vectors)
        logits = self.last(vectors)
        if labels is None:
            return {"logits": logits} if self.order == "named" else (logits, None)
        wanted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] if self.shifted else labels
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        named = {"logits": logits, "loss": loss}
        return named if self.order == "named" else tuple(named[name] for name in self.order.split())


def run(model: Any, records: list[dict[str, Any]], folder: Path, steps: int = 1, **more: Any) -> PrivateTrainer:
    """Steps with hardly any noise, all records in each."""
    privacy = clipless.Privacy(noise_multiplier=1e-3, delta=1e-3, accountant="rdp", seed=3)
    settings = {"per_device_train_batch_size": len(records), "gradient_accumulation_steps": 1, "max_steps": steps}
    settings |= {"lr_scheduler_type": "constant", "learning_rate": 0.1, "weight_decay": 0.0}
    given = {"train_dataset": records, "data_collator": hf.collate, "privacy": privacy, **more}
    trainer = PrivateTrainer(model, hf.arguments(folder, **settings), **given)
    trainer.train()
    return trainer


def same_label() -> list[dict[str, Any]]:
    """Every token is its own label; what comes next is no help."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, hf.VOCABULARY, (16, 8), generator=generator)
    return [{"input_ids": row.tolist(), "attention_mask": [1] * 8, "labels": row.tolist()} for row in tokens]


@pytest.mark.parametrize("order", ["named", "logits loss", "loss logits"])
@pytest.mark.parametrize(("zero", "shifted"), [(True, False), (False, False), (True, True), (False, True)])
def test_the_models_own_loss_is_found_and_trained(order: str, zero: bool, shifted: bool, tmp_path: Path) -> None:
    """Of the label at the token or of the next one's, wherever the loss is in the output, from a layer of zeros too."""
    torch.manual_seed(0)
    records = same_label()
    trainer = run(Tagger(order, zero, shifted), records, tmp_path, steps=2 if shifted else 25)
    model, inputs = trainer.model.eval(), hf.collate(records)
    with torch.no_grad():
        found = trainer.compute_record_losses(model, dict(inputs))
        alone = [model(**{key: value[n : n + 1] for key, value in inputs.items()}) for n in range(len(records))]
        own = [output["loss"] if order == "named" else min(output, key=Tensor.dim) for output in alone]
        logits = model(inputs["input_ids"])["logits" if order == "named" else 0]
    assert torch.allclose(found, torch.stack(own), atol=1e-5)
    assert shifted or float((logits.argmax(2) == inputs["labels"]).float().mean()) == 1.0


def test_a_model_that_draws_noise_in_its_forward_is_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer = run(Tagger(zero=False, noisy=True), same_label(), tmp_path, steps=3)
    assert trainer.private is not None
    assert trainer.private.ledger.steps == 3


def mixture(**more: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "vocab_size": hf.VOCABULARY,
        "max_position_embeddings": 32,
    }
    torch.manual_seed(1)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **more))  # type: ignore[arg-type]


def test_a_routers_auxiliary_loss_is_refused_however_small(tmp_path: Path) -> None:
    made = mixture(output_router_logits=True, router_aux_loss_coef=0.001)
    with pytest.raises(clipless.InvalidArgument, match="output_router_logits=False"):
        run(made, hf.texts(labels="tokens"), tmp_path)


class Balanced(Tagger):
    """With a small loss of the whole batch of which no setting tells."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        outputs = super().forward(input_ids, attention_mask, labels)
        chosen = outputs["logits"].softmax(2)
        load = nn.functional.one_hot(chosen.argmax(2), hf.VOCABULARY).float().mean((0, 1)) * chosen.mean((0, 1))
        return (
            {**outputs, "loss": outputs["loss"] + 0.001 * hf.VOCABULARY * load.sum()} if labels is not None else outputs
        )


def test_a_small_loss_of_the_whole_batch_is_no_loss_of_the_records(tmp_path: Path) -> None:
    with pytest.raises(clipless.InvalidArgument, match="not known here.*compute_loss_func"):
        run(Balanced(zero=False), same_label(), tmp_path)


def gpt2_classifier(pad: int | None) -> nn.Module:
    sizes = {"vocab_size": hf.VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    torch.manual_seed(1)
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes, pad_token_id=pad))  # type: ignore[arg-type]


@pytest.mark.parametrize("pad", [0, hf.VOCABULARY - 1])
@pytest.mark.parametrize("seed", range(3))
def test_a_padded_classifier_is_judged_by_its_padding_and_not_by_the_tokens(
    pad: int, seed: int, tmp_path: Path
) -> None:
    """It reads the last token that is no padding, if it knows what padding is. The collator pads with 0."""
    records = hf.texts()
    generator = torch.Generator().manual_seed(seed)
    for record in records:
        last = torch.randint(1, hf.VOCABULARY - 1, (), generator=generator)
        record["input_ids"] = [*record["input_ids"][:-1], int(last)]
    if pad:
        with pytest.raises(clipless.Misuse, match="collated alone"):
            run(gpt2_classifier(pad), records, tmp_path)
    else:
        assert run(gpt2_classifier(pad), records, tmp_path).state.global_step == 1
