"""Interrupted runs: by kill -9 at any moment, by signals, by a stop between two steps; each ends as if it never was."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import children
import clipless
from clipless.app import training
from clipless.app.training import TrainingSettings, save_run, train
from clipless.app.training.saving import Saving, saved_about
from clipless.clipping import CLIPPINGS
from clipless.errors import DamagedFile, Interrupted, InvalidArgument
from clipless.runs.journal import Journal
from clipless.runs.ledger_file import read_ledger
from clipless.runs.run_folder import RunFolder
from killing import KILLS, blobs
from killing import STEPS as KILLED_STEPS
from small_run import STEPS, begin, dataset

QUICK = TrainingSettings(model="linear", epochs=3, batch_size=32, seed=1, accountant="rdp")
ENVIRONMENT = {"NO_COLOR": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


# Killed.


@pytest.fixture(scope="module", params=KILLS)
def noise(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory, noise: str) -> list[dict[str, Any]]:
    script, folder = Path(__file__).parents[1] / "killing.py", tmp_path_factory.mktemp("killed")
    done = children.run(script, folder, noise, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    # torch 2.6 leaves a folder of its own to the garbage collector, which tells.
    assert not re.sub(r".*tempfile.*ResourceWarning: Implicitly cleaning up.*\n.*\n", "", done.stderr)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", ["moment", "write"])
def test_killed_runs_were_killed_in_the_middle(trials: list[dict[str, Any]], noise: str, kind: str) -> None:
    """Otherwise the tests below would say nothing."""
    mine = [trial for trial in trials if trial["how"] == kind]
    states = [state for trial in mine for state in trial["states"]]
    assert sum(trial["kills"] for trial in mine) >= KILLS[noise][kind]
    assert len({state["recorded"] for state in states}) > (5 if noise == "secure" else 1)
    assert any(0 < state["seen"] < KILLED_STEPS for state in states)


def test_a_killed_run_has_never_shown_more_than_its_ledger_says(trials: list[dict[str, Any]], noise: str) -> None:
    states = [state for trial in trials[1:] for state in trial["states"]]
    assert all(state["seen"] <= state["recorded"] for state in states)
    assert noise != "secure" or any(
        state["seen"] < state["recorded"] for state in states
    )  # a crash may over-count by the step it cut off
    assert all(state["recorded"] <= state["seen"] + 1 for state in states)


def test_a_killed_run_ends_bit_identical(trials: list[dict[str, Any]]) -> None:
    whole, *killed = trials
    for name in ("weights", "accuracies", "epsilon", "steps", "recorded_at_end"):
        assert {json.dumps(trial[name]) for trial in killed} == {json.dumps(whole[name])}


def test_a_repeated_step_shows_what_it_showed_before(trials: list[dict[str, Any]]) -> None:
    assert all(trial["differently_seen"] == 0 for trial in trials)


# Every policy, optimizer and way of loading.


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_every_policy_resumes_bit_for_bit(tmp_path: Path, clipping: str) -> None:
    whole = begin(clipping=clipping).go().close()
    run = begin(clipping=clipping)
    run.private.save_to(tmp_path / "ledger.jsonl")
    run.go(5).save(tmp_path / "run.pt")
    run.go(4).close()
    resumed = begin(seed=99, clipping=clipping).load(tmp_path / "run.pt").go().close()
    assert torch.equal(resumed.weights(), whole.weights())
    assert torch.equal(resumed.private.thresholds, whole.private.thresholds)
    assert resumed.private.history.to_dict() == whole.private.history.to_dict()
    assert resumed.private.ledger == whole.private.ledger


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RMSprop", "Adagrad", "ASGD"])
def test_every_kind_of_optimizer_state_resumes(tmp_path: Path, name: str) -> None:
    def optimizer(parameters: Iterator[Tensor]) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(parameters, lr=0.01)  # type: ignore[no-any-return]

    whole = begin(optimizer=optimizer).go().close()
    run = begin(optimizer=optimizer)
    run.private.save_to(tmp_path / "ledger.jsonl")
    run.go(5).save(tmp_path / "run.pt")
    run.go(2).close()
    resumed = begin(optimizer=optimizer).load(tmp_path / "run.pt").go().close()
    assert torch.equal(resumed.weights(), whole.weights())


class Listed(Dataset[tuple[Tensor, Tensor]]):
    """Records that are loaded one by one, by a DataLoader, which draws a random number of its own in each pass."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return dataset()[index]  # type: ignore[return-value]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_saved_in_the_middle_of_a_pass_of_a_dataloader_resumes(tmp_path: Path, workers: int) -> None:
    def data() -> DataLoader[Any]:
        return DataLoader(Listed(), batch_size=12, num_workers=workers)

    whole = begin(data=data(), batch_size=None).go().close()
    run = begin(data=data(), batch_size=None)
    run.private.save_to(tmp_path / "ledger.jsonl")
    for number, (x, y) in enumerate(run.private.loader):
        run.step(x, y)
        if number == 4:
            run.save(tmp_path / "run.pt")
        if number == 7:
            break
    run.close()
    resumed = begin(data=data(), batch_size=None).load(tmp_path / "run.pt").go().close()
    assert torch.equal(resumed.weights(), whole.weights())


def test_micro_batches_resume(tmp_path: Path) -> None:
    def go(run: Any, steps: int) -> Any:
        for _, parts in zip(range(steps), run.private.loader.microbatches(5), strict=False):
            run.optimizer.zero_grad()
            for x, y in parts:
                torch.nn.functional.cross_entropy(run.model(x), y).backward()
            run.optimizer.step()
        return run

    whole = go(begin(), STEPS).close()
    run = begin()
    run.private.save_to(tmp_path / "ledger.jsonl")
    go(run, 5).private.save_checkpoint(tmp_path / "run.pt")
    go(run, 3).close()
    resumed = begin()
    assert resumed.private.load_checkpoint(tmp_path / "run.pt") is None
    assert torch.equal(go(resumed, STEPS - 5).close().weights(), whole.weights())


# The training loop.


class StopAt:
    """Says stop once so many steps were taken."""

    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture(scope="module")
def whole() -> training.Result:
    return train(blobs(), QUICK)


@pytest.mark.parametrize("step", range(10))
def test_a_stopped_run_resumes_at_any_step(tmp_path: Path, whole: training.Result, step: int) -> None:
    """Nine steps in three epochs; also before the first, and after the last, before run.json is written."""
    with pytest.raises(Interrupted, match=rf"stopped after step {step} of 9.*clipless train --resume --out {tmp_path}"):
        train(blobs(), QUICK, saving=Saving(tmp_path), stop=StopAt(step))
    assert len(read_ledger(tmp_path / "ledger.jsonl").entries) == step
    result = train(blobs(), QUICK, saving=Saving(tmp_path, resume=True))
    save_run(result, tmp_path)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], value)
    assert (result.scores, result.ledger, result.epsilon) == (whole.scores, whole.ledger, whole.epsilon)
    assert sorted(os.listdir(tmp_path)) == ["ledger.jsonl", "model.pt", "run.json"]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["ledger_file"]["head"] == read_ledger(tmp_path / "ledger.jsonl").head


def stopped(out: Path, settings: TrainingSettings = QUICK, step: int = 4) -> None:
    with pytest.raises(Interrupted):
        train(blobs(), settings, saving=Saving(out), stop=StopAt(step))


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"lr": 0.3}, "lr"), ({"epsilon": 2.0}, "epsilon"), ({"seed": 2}, "seed"), ({"clipping": "abadi"}, "clipping")],
    ids=str,
)
def test_a_run_is_resumed_with_its_own_arguments_only(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    stopped(tmp_path)
    with pytest.raises(InvalidArgument, match=f"other arguments .different: {named}"):
        train(blobs(), replace(QUICK, **changes), saving=Saving(tmp_path, resume=True))


def test_an_unfinished_run_is_not_overwritten(tmp_path: Path) -> None:
    stopped(tmp_path)
    with pytest.raises(InvalidArgument, match="--resume"):
        train(blobs(), QUICK, saving=Saving(tmp_path))
    plain = train(blobs(), replace(QUICK, clipping="none"))
    with pytest.raises(InvalidArgument, match="choose another folder"):
        save_run(plain, tmp_path)
    assert RunFolder(tmp_path).unfinished
    train(blobs(), QUICK, saving=Saving(tmp_path, resume=True))


def test_a_finished_run_is_kept_and_not_resumed(tmp_path: Path) -> None:
    save_run(train(blobs(), QUICK, saving=Saving(tmp_path)), tmp_path)
    head = read_ledger(tmp_path / "ledger.jsonl").head
    with pytest.raises(InvalidArgument, match="finished"):
        train(blobs(), QUICK, saving=Saving(tmp_path, resume=True))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InvalidArgument, match="holds a finished run, and its ledger has to be kept"):
        train(blobs(), replace(QUICK, seed=2), saving=Saving(tmp_path))
    with pytest.raises(InvalidArgument, match="choose another folder"):
        save_run(train(blobs(), replace(QUICK, clipping="none")), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert read_ledger(tmp_path / "ledger.jsonl").head == head
    assert not RunFolder(tmp_path).unfinished


def test_a_run_cut_off_before_its_first_checkpoint_begins_anew_with_the_same_plan(tmp_path: Path) -> None:
    stopped(tmp_path, step=0)
    (tmp_path / "checkpoint.pt").unlink()
    with pytest.raises(InvalidArgument, match="with another plan"):
        train(blobs(), replace(QUICK, epsilon=1.0), saving=Saving(tmp_path, resume=True))
    assert train(blobs(), QUICK, saving=Saving(tmp_path, resume=True)).steps == 9


def test_steps_without_their_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    stopped(tmp_path)
    (tmp_path / "checkpoint.pt").unlink()
    with pytest.raises(InvalidArgument, match="stays spent"):
        train(blobs(), QUICK, saving=Saving(tmp_path, resume=True))


def test_a_run_that_is_still_going_on_is_left_alone(tmp_path: Path) -> None:
    stopped(tmp_path, step=0)
    found = read_ledger(tmp_path / "ledger.jsonl")
    (tmp_path / "checkpoint.pt").unlink()
    holder, _ = Journal.resume(found.path, found.run, 0, found.head)
    with pytest.raises(clipless.errors.LedgerInUse):
        train(blobs(), QUICK, saving=Saving(tmp_path, resume=True))
    holder.close()
    assert found.path.exists()


def test_all_steps_lost_still_ends_with_a_test(tmp_path: Path) -> None:
    """Killed after the last step and before its checkpoint, and resumed with new noise."""
    secure = replace(QUICK, noise="secure", seed=None)
    stopped(tmp_path, secure, step=7)
    earlier = (tmp_path / "checkpoint.pt").read_bytes()
    train(blobs(), secure, saving=Saving(tmp_path, resume=True))
    (tmp_path / "checkpoint.pt").write_bytes(earlier)
    result = train(blobs(), secure, saving=Saving(tmp_path, resume=True, reseed=True))
    assert result.steps == 9
    assert result.score == training.accuracy(result.model, blobs().test)


def test_reseeding_a_run_keeps_its_budget(tmp_path: Path, whole: training.Result) -> None:
    stopped(tmp_path)
    result = train(blobs(), QUICK, saving=Saving(tmp_path, resume=True, reseed=True))
    assert result.epsilon == whole.epsilon
    assert not torch.equal(*(next(iter(r.model.parameters())) for r in (result, whole)))


def test_a_run_says_what_it_was_begun_with(tmp_path: Path) -> None:
    assert saved_about(tmp_path) is None
    with pytest.raises(Interrupted):
        train(blobs(), QUICK, saving=Saving(tmp_path, data="here.csv"), stop=StopAt(1))
    about = saved_about(tmp_path)
    assert about is not None
    assert (about["source"], about["data"], TrainingSettings(**about["settings"])) == ("here.csv", "blobs", QUICK)


def test_without_privacy_nothing_is_kept_and_stopping_stops(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="has to start again"):
        train(blobs(), replace(QUICK, clipping="none"), saving=Saving(tmp_path), stop=StopAt(2))
    assert not os.listdir(tmp_path)


def test_a_damaged_checkpoint_is_an_error_and_not_a_new_run(tmp_path: Path) -> None:
    stopped(tmp_path)
    content = bytearray((tmp_path / "checkpoint.pt").read_bytes())
    content[-100] ^= 1
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(DamagedFile, match="digest"):
        train(blobs(), QUICK, saving=Saving(tmp_path, resume=True))


# The command line.


def interrupted(arguments: list[str], number: int, ledger: Path, lines: int) -> tuple[int, str]:
    """Exit code and stderr of a training process that gets a signal once its ledger has so many lines."""
    folder = ledger.parents[1]
    process = children.Child("clipless.app.cli", "train", *arguments, cwd=folder, notes=folder, environment=ENVIRONMENT)
    while not ledger.exists() or len(ledger.read_bytes().splitlines()) < lines:
        assert process.poll() is None, process.done()
        time.sleep(0.02)
    process.send_signal(number)
    done = process.done(60)
    return done.returncode, done.stderr


def test_a_signal_finishes_the_step_and_saves_and_resume_goes_on(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, time\nfrom torch import nn\n"
        "class Slow(nn.Module):\n"
        "    def forward(self, x):\n        time.sleep(0.1 * os.path.exists('slow'))\n        return x\n"
        "def make(shape, classes): return nn.Sequential(Slow(), nn.Flatten(), nn.Linear(64, classes))\n"
    )
    options = ["--model", "slow:make", "--epochs", "3", "--seed", "3", "--accountant", "rdp", "--out", "run"]
    ledger = tmp_path / "run" / "ledger.jsonl"
    (tmp_path / "slow").touch()
    code, errors = interrupted([*options, "--checkpoint-every", "1000"], signal.SIGTERM, ledger, 4)
    assert (code, "Traceback" in errors) == (143, False)
    assert "clipless train --resume --out run" in errors
    first = read_ledger(ledger)
    code, errors = interrupted(["--resume", "--out", "run"], signal.SIGINT, ledger, len(first.entries) + 4)
    assert (code, "Traceback" in errors) == (130, False)
    (tmp_path / "slow").unlink()
    done = children.run(
        "clipless.app.cli", "train", "--resume", "--out", "run", "--json", cwd=tmp_path, environment=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["steps"] == 3 * 6
    assert read_ledger(ledger, head=first.head).run == first.run
    assert not (tmp_path / "run" / "checkpoint.pt").exists()
