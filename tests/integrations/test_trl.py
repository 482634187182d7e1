"""PrivateSFTTrainer is the plain private loop, and what puts records together is refused."""

from pathlib import Path
from typing import Any

import datasets
import hf_problems as hf
import pytest
from test_transformers import PRIVACY, same
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig

from clipless.errors import InvalidArgument
from clipless.integrations.trl import PrivateSFTTrainer

WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(hf.VOCABULARY - 2))]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<eos>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def trainer(folder: Path, data: list[dict[str, Any]], model: Any, more: Any, **settings: Any) -> PrivateSFTTrainer:
    chosen = hf.arguments(folder).to_dict() | {"gradient_checkpointing": False, "bf16": False, "fp16": False}
    kept = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_steps",
        "use_cpu",
        "disable_tqdm",
        "bf16",
    )
    options = {name: chosen[name] for name in (*kept, "gradient_checkpointing", "fp16", "dataloader_pin_memory")}
    quiet: dict[str, Any] = {"report_to": [], "save_strategy": "no", "lr_scheduler_type": "constant"}
    return PrivateSFTTrainer(
        model,
        SFTConfig(str(folder), **(options | quiet | settings)),
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer(),
        privacy=PRIVACY,
        optimizers=(hf.optimizer_for(model), None),
        **more,
    )


def test_three_steps_are_those_of_the_plain_loop_bit_for_bit(tmp_path: Path) -> None:
    problem = hf.PROBLEMS["gpt2, tied"]
    watcher = hf.Watcher()
    more = {"data_collator": hf.collate, "callbacks": [watcher]}
    private = trainer(
        tmp_path, problem.records, problem.make(), more, dataset_kwargs={"skip_prepare_dataset": True}, max_length=None
    )
    private.train()
    expected = hf.plain_loop(problem)
    assert same(hf.weights_of(private.model), expected.weights)
    assert private.private is not None
    assert private.private.ledger.to_dict() == expected.private.ledger.to_dict()
    seen = {event for event, gradients in watcher.seen if gradients}
    assert seen == {"on_optimizer_step"}
    assert not {"loss", "mean_token_accuracy", "entropy", "num_tokens"} & {
        key for entry in private.state.log_history for key in entry
    }


def test_texts_are_tokenized_and_evaluated(tmp_path: Path) -> None:
    texts = [{"text": " ".join(f"w{(3 * n + k) % 30}" for k in range(4 + n % 5))} for n in range(16)]
    private = trainer(tmp_path, texts, hf.gpt2(), {}, max_steps=2, max_length=8)
    private.train()
    assert private.private is not None
    assert private.private.ledger.steps == 2
    assert private.evaluate(datasets.Dataset.from_list(texts[:4]))["eval_loss"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": True}, "packing=True .*several records into one row"),
        ({"padding_free": True, "max_length": None}, "padding_free=True .*one row"),
        ({"loss_type": "dft"}, "loss_type='dft' .*compute_record_losses"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_puts_records_together_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=message):
        trainer(tmp_path, [{"text": "w1 w2 w3"}] * 16, hf.gpt2(), {}, **settings)
