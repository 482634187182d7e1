"""Settings, optimizers and callbacks that people use with a Trainer: the run is the plain private loop, or is refused."""

from pathlib import Path
from typing import Any

import hf_problems as hf
import pytest
from test_transformers import PRIVACY, Crash, same, trainer
from torch.utils.data import DataLoader, Subset
from transformers import EarlyStoppingCallback, TrainerCallback, set_seed

import clipless
from clipless.integrations.transformers import PrivateTrainer

PROBLEM = hf.PROBLEMS["bert"]


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
        {"remove_unused_columns": False},
        {"dataloader_drop_last": True},
        {"average_tokens_across_devices": False},
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
        {"torch_empty_cache_steps": 1, "logging_nan_inf_filter": False, "max_grad_norm": 1.0},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, if its tests ran in this process: workers fork
def test_a_setting_changes_no_bit_of_the_run(settings: dict[str, Any], tmp_path: Path) -> None:
    private = trainer(tmp_path, PROBLEM, settings=settings)
    private.train()
    expected = hf.plain_loop(PROBLEM)
    assert same(hf.weights_of(private.model), expected.weights)
    assert private.private.ledger.to_dict() == expected.private.ledger.to_dict()


@pytest.mark.parametrize("name", ["adafactor", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"])
def test_an_optimizer_by_name_takes_the_private_gradients(name: str, tmp_path: Path) -> None:
    """Bit for bit what the same optimizer does in a loop of one's own."""
    settings = {"optim": name, "learning_rate": 0.01, "weight_decay": 0.0}
    watcher = hf.Watcher()
    private = trainer(tmp_path, PROBLEM, settings=settings, optimizers=(None, None), callbacks=[watcher])
    private.train()
    assert {event for event, gradients in watcher.seen if gradients} == {"on_optimizer_step"}

    model = PROBLEM.make()
    decayed = private.get_decay_parameter_names(model)
    groups = [[p for n, p in model.named_parameters() if (n in decayed) == chosen] for chosen in (True, False)]
    kind, options = PrivateTrainer.get_optimizer_cls_and_kwargs(private.args)
    optimizer = kind([{"params": group, "weight_decay": 0.0} for group in groups], **options)
    loader: DataLoader[Any] = DataLoader(PROBLEM.records, batch_size=8, collate_fn=hf.collate)  # type: ignore[arg-type]
    run = clipless.make_private(model, optimizer, loader, **PRIVACY.arguments(), steps=3)
    set_seed(42)
    model.train()
    for parts in run.loader.microbatches(4):
        for inputs in parts:
            run.backward(PROBLEM.losses(model, inputs))
        optimizer.step()
    run.detach()
    assert same(hf.weights_of(private.model), hf.weights_of(model))
    assert private.private.ledger.to_dict() == run.ledger.to_dict()


@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw"])
def test_an_optimizer_that_no_checkpoint_can_hold_is_refused_unless_none_is_saved(name: str, tmp_path: Path) -> None:
    settings = {"optim": name, "optim_target_modules": "all-linear"}
    with pytest.raises(clipless.InvalidArgument, match="save_only_model=True"):
        trainer(tmp_path, PROBLEM, settings={**settings, "save_strategy": "steps"})
    trainer(tmp_path, PROBLEM, settings={**settings, "save_strategy": "no"})
    trainer(tmp_path, PROBLEM, settings={**settings, "save_strategy": "steps", "save_only_model": True})


@pytest.mark.parametrize("crash", [4, 5])
def test_data_that_need_not_be_skipped_give_the_same_resumed_run(crash: int, tmp_path: Path) -> None:
    """The checkpoint is in the middle of an epoch; the batches that are left come from the private run."""
    settings = {"max_steps": -1, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 3}
    whole = trainer(tmp_path / "whole", PROBLEM, settings=settings)
    whole.train()
    settings["ignore_data_skip"] = True
    broken = trainer(tmp_path / "broken", PROBLEM, settings=settings, callbacks=[Crash(crash)])
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    broken.private.detach()
    resumed = trainer(tmp_path / "broken", PROBLEM, settings=settings)
    resumed.train(resume_from_checkpoint=True)
    assert same(hf.weights_of(resumed.model), hf.weights_of(whole.model))
    assert resumed.private.ledger.to_dict() == whole.private.ledger.to_dict()
    assert clipless.read_ledger(tmp_path / "broken" / "ledger.jsonl").ledger().steps == 6


# The score of the weights after each step.
SCORES = [3.0, 5.0, 1.0, 2.0, 0.0, 0.0]
SURE = hf.Problem(
    lambda: hf.bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), hf.texts(), hf.class_losses
)


def train_for_the_best(folder: Path, *callbacks: TrainerCallback, resumed: bool = False, **more: Any) -> Any:
    """Six steps, with an evaluation and a checkpoint after each, of which the best is loaded at the end."""
    settings = {"max_steps": 6, "load_best_model_at_end": True, "metric_for_best_model": "score", "eval_steps": 1}
    settings |= {"greater_is_better": True, "eval_strategy": "steps", "save_strategy": "steps", "save_steps": 1, **more}
    private = trainer(
        folder, SURE, settings=settings, eval_dataset=hf.texts(6), callbacks=list(callbacks),
        compute_metrics=lambda _: {"score": SCORES[private.state.global_step - 1]},
    )  # fmt: skip
    private.train(resume_from_checkpoint=resumed or None)
    return private


@pytest.mark.parametrize(("limit", "early", "steps"), [(None, False, 6), (1, False, 6), (2, False, 6), (2, True, 4)])
def test_the_best_weights_are_those_of_their_step_and_all_steps_are_paid_for(
    limit: int | None, early: bool, steps: int, tmp_path: Path
) -> None:
    callbacks = [EarlyStoppingCallback(2)] if early else []
    private = train_for_the_best(tmp_path, *callbacks, save_total_limit=limit)
    assert same(hf.weights_of(private.model), hf.plain_loop(SURE, steps=2).weights)
    whole = hf.plain_loop(SURE, steps=steps).private
    assert private.private.ledger.to_dict() == whole.ledger.to_dict()
    assert private.private.spent() == whole.spent()
    assert clipless.read_ledger(tmp_path / "ledger.jsonl").ledger().steps == steps
    assert [entry["epsilon"] for entry in private.state.log_history if "epsilon" in entry][-1] == whole.spent().epsilon
    # A run that was stopped may be resumed; keys of one that has ended are gone.
    assert bool(list(tmp_path.glob("checkpoint-*/clipless.checkpoint"))) == early


def test_the_best_weights_of_a_resumed_run_are_the_same(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_for_the_best(tmp_path, Crash(5), save_total_limit=2)
    private = train_for_the_best(tmp_path, resumed=True, save_total_limit=2)
    assert same(hf.weights_of(private.model), hf.plain_loop(SURE, steps=2).weights)
    assert private.private.spent().steps == 6


class Ends(TrainerCallback):
    """Ends training or the epoch, at one event."""

    def __init__(self, event: str, what: str) -> None:
        setattr(self, event, lambda args, state, control, **more: setattr(control, what, True))


@pytest.mark.parametrize("what", ["should_training_stop", "should_epoch_stop"])
def test_a_callback_ends_training_after_a_step(what: str, tmp_path: Path) -> None:
    """Each of three epochs is ended after one of its two steps, or training after the first."""
    settings = {"max_steps": -1, "num_train_epochs": 3}
    private = trainer(tmp_path, PROBLEM, settings=settings, callbacks=[Ends("on_step_end", what)])
    private.train()
    taken = 1 if what == "should_training_stop" else 3
    expected = hf.plain_loop(PROBLEM, steps=taken)
    assert same(hf.weights_of(private.model), expected.weights)
    assert private.private.spent() == expected.private.spent()


@pytest.mark.parametrize("event", ["on_step_begin", "on_substep_end"])
@pytest.mark.parametrize("what", ["should_training_stop", "should_epoch_stop"])
def test_a_callback_that_ends_it_within_a_batch_is_refused(event: str, what: str, tmp_path: Path) -> None:
    settings = {"max_steps": -1, "num_train_epochs": 2}
    private = trainer(tmp_path, PROBLEM, settings=settings, callbacks=[Ends(event, what)])
    with pytest.raises(clipless.Misuse, match="before step|not stepped"):
        private.train()
    assert private.private.spent().steps == 0


def test_a_model_on_several_devices_in_one_process_is_refused(tmp_path: Path) -> None:
    private = trainer(tmp_path, PROBLEM)
    private.args._n_gpu = 2
    with pytest.raises(clipless.Misuse, match="DataParallel"):
        private.train()


def test_metrics_on_training_records_are_warned_of_wherever_they_are_asked_for(tmp_path: Path) -> None:
    records, other = PROBLEM.records, hf.texts(6)
    for given in (records, {"train": records, "other": other}, Subset(records, [0, 1])):  # type: ignore[arg-type]
        with pytest.warns(UserWarning, match="not private"):
            trainer(tmp_path, PROBLEM, eval_dataset=given)
    private = trainer(tmp_path, PROBLEM, eval_dataset={"other": other})
    with pytest.warns(UserWarning, match="not private"):
        private.evaluate(records, metric_key_prefix="train")
    with pytest.warns(UserWarning, match="not private"):
        private.predict(records)
    assert private.evaluate()["eval_other_loss"] == private.predict(other).metrics["test_loss"]


def test_an_evaluation_between_two_micro_batches_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    class Evaluates(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            private.evaluate(hf.texts(6))
            assert all(p.grad is None for p in more["model"].parameters())

    private = trainer(tmp_path, SURE, callbacks=[Evaluates()])
    private.train()
    expected = hf.plain_loop(SURE)
    assert same(hf.weights_of(private.model), expected.weights)
    assert private.private.ledger.to_dict() == expected.private.ledger.to_dict()


def test_a_callback_that_takes_a_batch_for_itself_is_refused(tmp_path: Path) -> None:
    class Takes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            next(iter(more["train_dataloader"]))

    private = trainer(tmp_path, PROBLEM, callbacks=[Takes()])
    with pytest.raises(clipless.Misuse, match="not stepped"):
        private.train()
    assert private.private.spent().steps == 1


def test_a_secret_number_of_records_is_nowhere_in_the_run(tmp_path: Path) -> None:
    """Plan, length of an epoch, what is logged but times, and the ledger's plan are the same with one record less."""
    privacy = clipless.Privacy(**hf.PLAN, neighbours="add-remove", sample_rate=0.2)
    seen = []
    for size in (hf.SIZE, hf.SIZE - 1):
        folder = tmp_path / str(size)
        private = trainer(folder, PROBLEM, privacy=privacy, train_dataset=PROBLEM.records[:size])
        output = private.train()
        logged = [
            {k: v for k, v in entry.items() if "second" not in k and "runtime" not in k}
            for entry in private.state.log_history
        ]
        metrics = {
            k: v for k, v in output.metrics.items() if "second" not in k and "runtime" not in k and "loss" not in k
        }
        plan, loader = private.private.plan, private.get_train_dataloader()
        read = clipless.read_ledger(folder / "ledger.jsonl")
        epochs = (private.state.max_steps, private.state.num_train_epochs, private.state.epoch)
        seen.append((plan, read.plan, logged, metrics, len(loader), private.num_examples(loader), epochs))
    assert seen[0][0] == seen[1][0]
    assert str(seen[0][1:]) == str(seen[1][1:])
    assert (plan.dataset_size, plan.sample_rate, plan.expected_batch, plan.steps) == (None, 0.2, 8, 3)
    epochs_alone = trainer(tmp_path, PROBLEM, privacy=privacy, settings={"max_steps": -1, "num_train_epochs": 1})
    with pytest.raises(clipless.InvalidArgument, match="give max_steps= in place of epochs"):
        epochs_alone.train()
