"""PrivateTrainer is the plain private loop: the same weights bit for bit, the same ledger, nothing seen without noise."""

import json
import math
from pathlib import Path
from typing import Any

import datasets
import hf_problems as hf
import pytest
import torch
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, TrainerCallback, set_seed

import clipless
from clipless.integrations.transformers import PrivateTrainer

PRIVACY = clipless.Privacy(**hf.PLAN)


def trainer(folder: Path, problem: hf.Problem, model: nn.Module | None = None, **more: Any) -> PrivateTrainer:
    made = problem.make() if model is None else model
    settings = more.pop("settings", {})
    given = {"train_dataset": problem.records, "data_collator": hf.collate, "privacy": PRIVACY, **more}
    given.setdefault("optimizers", (hf.optimizer_for(made), None))
    if given["optimizers"][1] is None and "lr_scheduler_type" not in settings:
        settings = {"lr_scheduler_type": "constant", **settings}
    return PrivateTrainer(made, hf.arguments(folder, **settings), **given)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", hf.PROBLEMS)
def test_three_steps_are_those_of_the_plain_loop_bit_for_bit(name: str, tmp_path: Path) -> None:
    problem = hf.PROBLEMS[name]
    watcher = hf.Watcher()
    private = trainer(tmp_path, problem, callbacks=[watcher])
    private.train()
    expected = hf.plain_loop(problem)
    assert same(hf.weights_of(private.model), expected.weights)
    assert not same(expected.weights, hf.weights_of(problem.make()))
    assert private.private.ledger.to_dict() == expected.private.ledger.to_dict()
    assert private.private.plan.to_dict() == expected.private.plan.to_dict()
    assert clipless.read_ledger(tmp_path / "ledger.jsonl").ledger().steps == 3

    # What is visible at any event is None, or exactly what the plain loop released in that step.
    released = [gradients for event, gradients in watcher.seen if event == "on_optimizer_step"]
    assert len(released) == 3
    assert all(map(same, released, expected.gradients))
    assert all(gradients for gradients in released)
    others = [event for event, gradients in watcher.seen if gradients and event != "on_optimizer_step"]
    assert others == []
    assert {"on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_step_end", "on_log", "on_train_end"} <= {
        event for event, _ in watcher.seen
    }


def test_gradient_checkpointing_changes_no_bit(tmp_path: Path) -> None:
    """Dropout included: against the plain private loop, which keeps all activations."""
    problem = hf.PROBLEMS["bert"]
    private = trainer(tmp_path, problem, settings={"gradient_checkpointing": True})
    private.train()
    assert private.model.is_gradient_checkpointing
    expected = hf.plain_loop(problem)
    assert same(hf.weights_of(private.model), expected.weights)
    assert private.private.ledger.to_dict() == expected.private.ledger.to_dict()


def test_epochs_schedulers_and_the_trainers_own_optimizer(tmp_path: Path) -> None:
    """Two passes of two steps; AdamW with its groups and a learning rate that falls, all made by the Trainer."""
    problem = hf.PROBLEMS["bert"]
    settings = {"max_steps": -1, "num_train_epochs": 2, "learning_rate": 0.01, "lr_scheduler_type": "linear"}
    private = trainer(tmp_path, problem, settings=settings, optimizers=(None, None))
    private.train()
    assert private.private.plan.steps == 4
    assert private.private.epochs == 2
    assert private.state.global_step == 4
    assert private.state.epoch == 2
    rates = [entry["learning_rate"] for entry in private.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])

    model = problem.make()
    names = private.get_decay_parameter_names(model)
    groups = [[p for n, p in model.named_parameters() if (n in names) == decayed] for decayed in (True, False)]
    kind, options = PrivateTrainer.get_optimizer_cls_and_kwargs(private.args)
    optimizer = kind([{"params": group, "weight_decay": 0.0} for group in groups], **options)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    loader = torch.utils.data.DataLoader(problem.records, batch_size=8, collate_fn=hf.collate)  # type: ignore[arg-type, var-annotated]
    run = clipless.make_private(model, optimizer, loader, **PRIVACY.arguments(), epochs=2)
    set_seed(42)
    model.train()
    for _ in range(run.epochs):
        for parts in run.loader.microbatches(4):
            for inputs in parts:
                run.backward(problem.losses(model, inputs))
            optimizer.step()
            falling.step()
    run.detach()
    assert same(hf.weights_of(model), hf.weights_of(private.model))


def test_a_datasets_dataset_with_other_columns_gives_the_same_run(tmp_path: Path) -> None:
    problem = hf.PROBLEMS["bert"]
    records = datasets.Dataset.from_list([{**record, "comment": "secret"} for record in problem.records])
    private = trainer(tmp_path, problem, train_dataset=records)
    private.train()
    assert same(hf.weights_of(private.model), hf.plain_loop(problem).weights)


def test_the_batch_is_one_poisson_sample_whatever_its_parts(tmp_path: Path) -> None:
    """Without dropout the weights do not depend on how the batch is divided, but for rounding. In ten steps some batches
    have more micro-batches than there are turns."""
    problem = hf.Problem(
        lambda: hf.bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), hf.texts(), hf.class_losses
    )
    ends = []
    for size, turns in ((8, 1), (2, 4), (1, 8)):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": turns, "max_steps": 10}
        folder = tmp_path / str(size)
        sgd = problem.make()
        optimizer = torch.optim.SGD(sgd.parameters(), lr=0.1)
        private = trainer(folder, problem, model=sgd, settings=settings, optimizers=(optimizer, None))
        private.train()
        assert private.private.plan.expected_batch == 8
        ends.append(torch.cat([value.flatten() for value in hf.weights_of(private.model).values()]))
    assert torch.allclose(ends[0], ends[1], atol=1e-6)
    assert torch.allclose(ends[0], ends[2], atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "gpt2, tied", "lora"])
def test_removing_a_record_moves_the_sum_by_at_most_the_threshold(name: str, tmp_path: Path) -> None:
    """Every record is in the batch (rate 1), once with and once without one that is long and far off."""
    problem = hf.PROBLEMS[name]
    odd = {**problem.records[0], "input_ids": [hf.VOCABULARY - 1] * 14, "attention_mask": [1] * 14}
    if name == "gpt2, tied":
        odd["labels"] = [1] * 14
    records = [*problem.records[:7], odd]
    sums = []
    for kept, size, turns in ((records, 4, 2), (records[:7], 7, 1)):
        torch.manual_seed(0)
        model = problem.make().eval()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for parameter in model.parameters():
            parameter.data *= 3
        watcher, privacy = hf.Watcher(), clipless.Privacy(noise_multiplier=0.1, delta=1e-3, clipping="abadi", seed=3)
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": turns, "max_steps": 1}
        private = trainer(
            tmp_path / str(size),
            problem,
            model,
            train_dataset=kept,
            callbacks=[watcher],
            privacy=privacy,
            settings=settings,
        )
        private.train()
        (released,) = [gradients for event, gradients in watcher.seen if event == "on_optimizer_step"]
        sums.append(torch.cat([value.flatten() for value in released.values()]).double() * len(kept))
    moved = float((sums[0] - sums[1]).norm())
    assert 0.5 < moved <= 1 + 1e-3


class Crash(TrainerCallback):
    """Ends training with an exception after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("name", "crash"), [("bert", 5), ("bert", 4), ("lora", 5)])
def test_a_resumed_run_ends_as_if_it_had_not_been_interrupted(name: str, crash: int, tmp_path: Path) -> None:
    """Three epochs of two steps, a checkpoint every other step and in the middle of an epoch, an interruption later."""
    problem = hf.PROBLEMS[name]
    settings = {
        "max_steps": -1,
        "num_train_epochs": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "lr_scheduler_type": "linear",
    }
    made = {"settings": settings, "optimizers": (None, None)}
    whole = trainer(tmp_path / "whole", problem, **made)
    whole.train()
    broken = trainer(tmp_path / "broken", problem, callbacks=[Crash(crash)], **made)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    broken.private.detach()
    assert list((tmp_path / "broken").glob("checkpoint-3/clipless.checkpoint"))
    resumed = trainer(tmp_path / "broken", problem, **made)
    resumed.train(resume_from_checkpoint=True)
    assert same(hf.weights_of(resumed.model), hf.weights_of(whole.model))
    assert resumed.private.ledger.to_dict() == whole.private.ledger.to_dict()
    assert resumed.private.spent() == whole.private.spent()
    assert resumed.state.global_step == 6
    assert clipless.read_ledger(tmp_path / "broken" / "ledger.jsonl").ledger().steps == 6
    # The keys of a finished run are gone; the checkpoints remain as the Trainer wrote them.
    assert list((tmp_path / "broken").glob("checkpoint-*/model.safetensors")) or name == "lora"
    assert not list((tmp_path / "broken").glob("checkpoint-*/clipless.checkpoint"))


def test_states_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    problem = hf.PROBLEMS["lora"]
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    first = trainer(tmp_path, problem, settings=settings, callbacks=[Crash(3)])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    first.private.detach()
    with pytest.raises(clipless.InvalidArgument, match="exists already"):
        trainer(tmp_path, problem, settings=settings).train()
    with pytest.raises(clipless.InvalidArgument, match="another plan"):
        trainer(tmp_path, problem, settings={**settings, "max_steps": 5}).train(resume_from_checkpoint=True)
    state = tmp_path / "checkpoint-2" / "trainer_state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "global_step": 1}))
    with pytest.raises(clipless.Misuse, match="different steps"):
        trainer(tmp_path, problem, settings=settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (tmp_path / "checkpoint-1" / "clipless.checkpoint").unlink()
    with pytest.raises(clipless.InvalidArgument, match=r"has no clipless\.checkpoint"):
        trainer(tmp_path, problem, settings=settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_what_is_logged_saved_and_returned_is_private(tmp_path: Path) -> None:
    problem = hf.PROBLEMS["bert"]
    private = trainer(tmp_path, problem, eval_dataset=hf.texts(6), settings={"eval_strategy": "steps", "eval_steps": 1})
    done = private.train()
    names = {name for entry in private.state.log_history for name in entry}
    assert not {name for name in names if name.endswith("loss") and not name.startswith("eval")}
    assert "grad_norm" not in names
    assert math.isnan(done.training_loss)
    assert "train_loss" not in done.metrics
    assert private.state.total_flos == 0
    spent = [entry["epsilon"] for entry in private.state.log_history if "epsilon" in entry]
    assert spent == sorted(spent)
    assert spent[-1] == private.private.spent().epsilon > 0
    assert [entry["eval_loss"] for entry in private.state.log_history if "eval_loss" in entry]

    before = private.evaluate()
    private.save_model(str(tmp_path / "saved"))
    loaded = type(private.model).from_pretrained(tmp_path / "saved")
    assert same(hf.weights_of(loaded), hf.weights_of(private.model))
    predicted = private.predict(hf.texts(6))
    assert predicted.predictions.shape == (6, 2)
    assert predicted.metrics["test_loss"] == before["eval_loss"]
    with pytest.raises(clipless.Misuse, match="called already"):
        private.train()


def test_the_training_loss_is_there_if_asked_for_under_a_name_that_says_what_it_is(tmp_path: Path) -> None:
    problem = hf.PROBLEMS["bert"]
    settings = {"max_steps": 1, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    private = trainer(tmp_path, problem, settings=settings, log_not_private_loss=True)
    done = private.train()
    model = problem.make().train()
    set_seed(42)
    expected = float(problem.losses(model, hf.collate(problem.records)).detach().mean())
    (entry,) = [entry for entry in private.state.log_history if "loss_not_private" in entry]
    assert entry["loss_not_private"] == pytest.approx(expected, rel=1e-5)
    assert done.training_loss == done.metrics["train_loss_not_private"] == pytest.approx(expected, rel=1e-5)
    assert not {"loss", "train_loss"} & {name for entry in private.state.log_history for name in entry}


class PrivateSeq2SeqTrainer(PrivateTrainer, Seq2SeqTrainer):
    pass


def test_it_goes_together_with_another_trainer(tmp_path: Path) -> None:
    problem = hf.PROBLEMS["t5"]
    model = problem.make()
    from transformers import Seq2SeqTrainingArguments

    settings = {key: value for key, value in vars(hf.arguments(tmp_path)).items() if key in ("use_cpu", "max_steps")}
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path),
        **settings,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        predict_with_generate=True,
        save_strategy="no",
    )
    private = PrivateSeq2SeqTrainer(
        model,
        arguments,
        train_dataset=problem.records,
        data_collator=hf.collate,
        optimizers=(hf.optimizer_for(model), None),
        privacy=PRIVACY,
    )
    private.train()
    assert same(hf.weights_of(private.model), hf.plain_loop(problem).weights)
    predicted = private.predict(problem.records[:2], max_length=5)
    assert predicted.predictions.shape[0] == 2


def test_bfloat16_needs_no_scaler(tmp_path: Path) -> None:
    private = trainer(tmp_path, hf.PROBLEMS["bert"], settings={"bf16": True})
    private.train()
    assert private.private.spent().steps == 3
