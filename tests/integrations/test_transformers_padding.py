"""A record's loss must not depend on how far it is padded, which the other records of its batch decide."""

from pathlib import Path
from typing import Any

import hf_problems as hf
import pytest
import torch
from torch import Tensor, nn

import clipless
from clipless.integrations.transformers import PrivateTrainer

PRIVACY = clipless.Privacy(**{**hf.PLAN, "delta": 1e-4})


def trainer(folder: Path, name: str, collate: Any, **more: Any) -> PrivateTrainer:
    problem = hf.PROBLEMS[name]
    model = problem.make()
    given = {"train_dataset": problem.records, "data_collator": collate, "privacy": PRIVACY, **more}
    settings = {"max_steps": 1, "lr_scheduler_type": "constant", "remove_unused_columns": False}
    settings["gradient_accumulation_steps"] = len(given["train_dataset"]) // 4
    return PrivateTrainer(model, hf.arguments(folder, **settings), optimizers=(hf.optimizer_for(model), None), **given)


def without_mask(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: value for name, value in hf.collate(records).items() if name != "attention_mask"}


def padded_on_the_left(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    turned = hf.collate([{name: value[::-1] for name, value in record.items()} for record in records])
    return {name: value.flip(1) for name, value in turned.items()}


def to_one_length(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    length = {"input_ids": [0] * 12, "attention_mask": [0] * 12, "labels": 0}
    batch = hf.collate([*records, length])
    return {name: value[:-1] for name, value in batch.items() if name != "attention_mask"}


def masked_at_random(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = hf.collate(records)
    hidden = torch.rand(batch["input_ids"].shape) < 0.3
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, hf.VOCABULARY - 1)}


def by_length(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    return without_mask(sorted(records, key=lambda record: -len(record["input_ids"])))


def with_positions(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = without_mask(records)
    return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1]).unsqueeze(0)}


def masked_unmasked(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: value for name, value in masked_at_random(records).items() if name != "attention_mask"}


def one_long(count: int, odd: int) -> list[dict[str, Any]]:
    """Texts of five tokens, of which one is longer."""
    generator = torch.Generator().manual_seed(0)
    lengths = [14 if number == odd else 5 for number in range(count)]
    tokens = [torch.randint(1, hf.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": k % 2} for k, row in enumerate(tokens)]


def squared(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels, reduction="none") ** 2


@pytest.mark.parametrize(
    ("name", "collate", "more"),
    [
        ("bert", without_mask, {}),
        ("bert", without_mask, {"compute_loss_func": squared}),
        ("lora", without_mask, {}),
        ("gpt2, tied", padded_on_the_left, {}),
        ("t5", without_mask, {}),
        ("bert", without_mask, {"train_dataset": one_long(200, 3)}),
        ("bert", by_length, {}),
        ("bert", with_positions, {}),
        ("bert", masked_unmasked, {}),
    ],
)
def test_padding_that_is_not_masked_is_refused(name: str, collate: Any, more: dict[str, Any], tmp_path: Path) -> None:
    private = trainer(tmp_path, name, collate, **more)
    before = hf.weights_of(private.model)
    with pytest.raises(clipless.Misuse, match=r"collated alone.*attention_mask.*fixed length"):
        private.train()
    assert all(torch.equal(value, before[name]) for name, value in hf.weights_of(private.model).items())
    assert not list(tmp_path.glob("ledger*"))


@pytest.mark.parametrize(
    ("name", "collate"),
    [("bert", hf.collate), ("bert", to_one_length), ("bert", masked_at_random), ("gpt2, tied", hf.collate)],
)
def test_padding_that_makes_no_difference_is_allowed(name: str, collate: Any, tmp_path: Path) -> None:
    private = trainer(tmp_path, name, collate)
    private.train()
    assert private.private is not None
    assert private.private.spent().steps == 1
