"""Tiny Hugging Face models, built from their configurations, with data of unequal lengths and a plain private loop."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, PrefixTuningConfig, TaskType, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import clipless

VOCABULARY = 40
SIZE = 16
PLAN = {"noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp", "seed": 3}

Losses = Callable[[nn.Module, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Problem:
    """A model, its records, and its losses, one per record, written independently of the library."""

    make: Callable[[], nn.Module]
    records: list[dict[str, Any]]
    losses: Losses


def collate(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Records padded to the longest one: inputs with 0, labels with -100."""
    batch = {}
    for name in records[0]:
        values = [torch.as_tensor(record[name]) for record in records]
        if values[0].dim():
            padding = -100 if name == "labels" else 0
            batch[name] = nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=padding)
        else:
            batch[name] = torch.stack(values)
    return batch


def texts(size: int = SIZE, labels: str = "class") -> list[dict[str, Any]]:
    """Records of 4 to 9 tokens as plain lists, labelled with a class, or with their own tokens of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    found: list[dict[str, Any]] = []
    for number in range(size):
        length = int(torch.randint(4, 10, (), generator=generator))
        tokens = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        label: Any = number % 2
        if labels == "tokens":
            label = [-100 if place < number % 3 else token for place, token in enumerate(tokens)]
        found.append({"input_ids": tokens, "attention_mask": [1] * length, "labels": label})
    return found


def bert(**more: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(1)
    return BertForSequenceClassification(
        BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **{**sizes, **more})
    )


def gpt2() -> nn.Module:
    """With its head tied to the embedding, as always."""
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2))


def t5() -> nn.Module:
    """With dropout inside fused attention, to which learned position biases are added."""
    torch.manual_seed(1)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, **sizes)
    return T5ForConditionalGeneration._from_config(config, attn_implementation="sdpa")


def lora() -> nn.Module:
    torch.manual_seed(1)
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["query", "value"]
    )
    return get_peft_model(bert(), config)


def prefix() -> nn.Module:
    torch.manual_seed(1)
    return get_peft_model(gpt2(), PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3))


def class_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def token_means(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses.sum(1) / (labels != -100).sum(1).clamp(min=1)


def next_token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return token_means(logits[:, :-1], batch["labels"][:, 1:])


def translation_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"]
    shifted = F.pad(labels[:, :-1], (1, 0), value=0).masked_fill(F.pad(labels[:, :-1], (1, 0)) == -100, 0)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    return token_means(model(**inputs, decoder_input_ids=shifted).logits, labels)


PROBLEMS = {
    "bert": Problem(bert, texts(), class_losses),
    "gpt2, tied": Problem(gpt2, texts(labels="tokens"), next_token_losses),
    "t5": Problem(t5, texts(labels="tokens"), translation_losses),
    "lora": Problem(lora, texts(), class_losses),
    "prefix": Problem(prefix, texts(labels="tokens"), next_token_losses),
}


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    """Expected batches of 8 in micro-batches of 4, on the CPU, quietly."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "log_level": "error",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(str(folder), **{**settings, **more})


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@dataclass
class Outcome:
    weights: dict[str, Tensor]
    gradients: list[dict[str, Tensor]]
    private: clipless.Private


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain_loop(problem: Problem, seed: int = 42, part: int = 4, batch: int = 8, **plan: Any) -> Outcome:
    """What the trainer must do, by hand: make_private, micro-batches, one step for each batch."""
    model = problem.make()
    optimizer = optimizer_for(model)
    loader = DataLoader(problem.records, batch_size=batch, collate_fn=collate)  # type: ignore[arg-type, var-annotated]
    private = clipless.make_private(model, optimizer, loader, **{"steps": 3, **PLAN, **plan})
    set_seed(seed)
    model.train()
    gradients = []
    for parts in private.loader.microbatches(part):
        for inputs in parts:
            private.backward(problem.losses(model, inputs))
        optimizer.step()
        gradients.append(gradients_of(model))
        optimizer.zero_grad()
    private.detach()
    return Outcome(weights_of(model), gradients, private)


class Watcher(TrainerCallback):
    """Keeps the gradients that are visible at every event of a Trainer."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Tensor]]] = []


def _watching(name: str) -> Callable[..., None]:
    def event(self: Watcher, args: Any, state: Any, control: Any, **more: Any) -> None:
        if more.get("model") is not None:
            self.seen.append((name, gradients_of(more["model"])))

    return event


EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]
for _name in EVENTS:
    setattr(Watcher, _name, _watching(_name))
