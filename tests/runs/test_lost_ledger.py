"""A ledger that is replaced, deleted or cut while a run writes it: nothing is released that it does not hold."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import children
from clipless.accounting import Ledger, StepEvent
from clipless.errors import InvalidArgument, Misuse
from clipless.runs import journal as journal_module
from clipless.runs.journal import Journal
from clipless.runs.ledger_file import read_ledger
from small_run import STEPS, begin

ENVIRONMENT = {"NO_COLOR": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
TAKEN = 7


def renamed(ledger: Path, older: Path) -> None:
    """As a tool does that synchronizes a folder or restores a file."""
    moved = ledger.with_name("moved")
    shutil.copy(older, moved)
    moved.replace(ledger)


def same_again(ledger: Path, older: Path) -> None:
    """The same contents in another file, to which later lines would not be added."""
    moved = ledger.with_name("moved")
    shutil.copy(ledger, moved)
    moved.replace(ledger)


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "replaced": (renamed, "was replaced"),
    "replaced by the same": (same_again, "was replaced"),
    "deleted": (lambda ledger, older: ledger.unlink(), "was deleted"),
    "restored in place": (lambda ledger, older: ledger.write_bytes(older.read_bytes()), "was changed"),
    "cut": (lambda ledger, older: os.truncate(ledger, 50), "was changed"),
    "edited": (lambda ledger, older: ledger.write_bytes(ledger.read_bytes()[:-2] + b" \n"), "was changed"),
}


def disturbed(folder: Path, damage: str) -> tuple[object, str]:
    """A run whose ledger is damaged after some steps, and the refusal of the step after them. Its last checkpoint is of step
    5."""
    run = begin()
    ledger, older = folder / "ledger.jsonl", folder / "older"
    run.private.save_to(ledger)
    run.go(3)
    shutil.copy(ledger, older)
    run.go(2).save(folder / "run.pt")
    run.go(TAKEN - 5)
    weights = run.weights()
    DAMAGES[damage][0](ledger, older)
    with pytest.raises(Misuse, match=DAMAGES[damage][1]) as refused:
        run.go(1)
    assert torch.equal(run.weights(), weights)
    assert all(p.grad is None for p in run.model.parameters())
    return run, str(refused.value)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_step_is_not_released_that_the_file_at_the_path_would_miss(tmp_path: Path, damage: str) -> None:
    run, message = disturbed(tmp_path, damage)
    assert "nothing more is released" in message
    with pytest.raises(Misuse):  # and it stays so
        run.go(1)  # type: ignore[attr-defined]
    run.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("damage", ["replaced", "replaced by the same", "deleted"])
def test_what_was_recorded_is_saved_and_the_run_goes_on_from_it(tmp_path: Path, damage: str) -> None:
    whole = begin().go().close()
    run, message = disturbed(tmp_path, damage)
    run.close()  # type: ignore[attr-defined]
    (copy,) = tmp_path.glob("ledger.*.jsonl")
    assert f"what was recorded is in {copy}" in message
    assert len(read_ledger(copy).entries) == TAKEN
    copy.replace(tmp_path / "ledger.jsonl")
    resumed = begin().load(tmp_path / "run.pt").go().close()
    assert torch.equal(resumed.weights(), whole.weights())
    assert len(read_ledger(tmp_path / "ledger.jsonl").entries) == STEPS


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_checkpoint_is_saved_for_a_ledger_that_is_lost(tmp_path: Path, damage: str) -> None:
    run = begin()
    ledger = tmp_path / "ledger.jsonl"
    run.private.save_to(ledger)
    shutil.copy(ledger, tmp_path / "older")
    run.go(3)
    DAMAGES[damage][0](ledger, tmp_path / "older")
    with pytest.raises(Misuse, match=DAMAGES[damage][1]):
        run.save(tmp_path / "run.pt")
    assert not (tmp_path / "run.pt").exists()
    run.close()


def test_a_folder_that_is_gone_stops_the_run_and_says_what_stays_spent(tmp_path: Path) -> None:
    run = begin()
    folder = tmp_path / "run"
    folder.mkdir()
    run.private.save_to(folder / "ledger.jsonl")
    run.go(3)
    shutil.rmtree(folder)
    with pytest.raises(Misuse, match=r"was deleted.*could not be saved again.*3 steps were taken, and stay spent"):
        run.go(1)
    run.close()


def test_a_path_that_leads_elsewhere_later_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a folder that is gone, a link that now names another run, and from a current folder that is another one."""
    for name in ("kept", "older", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "latest").symlink_to("kept")
    monkeypatch.chdir(tmp_path)
    run = begin()
    run.private.save_to("older/../latest/ledger.jsonl")
    run.go(3)
    (tmp_path / "older").rmdir()
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("other")
    monkeypatch.chdir(tmp_path / "other")
    run.go().close()
    assert len(read_ledger(tmp_path / "kept" / "ledger.jsonl").entries) == STEPS
    assert not list((tmp_path / "other").iterdir())


def test_a_step_is_not_released_if_the_file_is_replaced_while_its_line_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin()
    ledger = tmp_path / "ledger.jsonl"
    run.private.save_to(ledger)
    run.go(2)
    shutil.copy(ledger, tmp_path / "older")
    sync = os.fsync

    def replaced(descriptor: int) -> None:
        sync(descriptor)
        if not (tmp_path / "done").exists():
            (tmp_path / "done").touch()
            renamed(ledger, tmp_path / "older")

    monkeypatch.setattr(journal_module.os, "fsync", replaced)
    with pytest.raises(Misuse, match="was replaced"):
        run.go(1)
    assert all(p.grad is None for p in run.model.parameters())
    run.close()


def test_the_command_line_stops_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom torch import nn\n"
        "class Slow(nn.Module):\n    def forward(self, x):\n        time.sleep(0.05)\n        return x\n"
        "def make(shape, classes): return nn.Sequential(Slow(), nn.Flatten(), nn.Linear(64, classes))\n"
    )
    options = ["--model", "slow:make", "--epochs", "3", "--accountant", "rdp", "--out", "run"]
    ledger = tmp_path / "run" / "ledger.jsonl"
    process = children.Child(
        "clipless.app.cli", "train", *options, cwd=tmp_path, notes=tmp_path, environment=ENVIRONMENT
    )
    while not ledger.exists() or len(ledger.read_bytes().splitlines()) < 5:
        assert process.poll() is None, process.done()
        time.sleep(0.01)
    same_again(ledger, ledger)
    done = process.done(60)
    assert done.returncode == 2, done.stderr
    assert "was replaced while this run was writing it" in done.stderr
    (copy,) = ledger.parent.glob("ledger.*.jsonl")
    copy.replace(ledger)
    resume = ["train", "--resume", "--out", "run", "--json"]
    again = children.run("clipless.app.cli", *resume, cwd=tmp_path, environment=ENVIRONMENT)
    assert again.returncode == 0, again.stderr
    assert len(read_ledger(ledger).entries) == 18


# Two starters of one run.

STARTER = """
import os, sys, time
from pathlib import Path

from clipless.accounting import Ledger, StepEvent
from clipless.errors import CliplessError
from clipless.runs import journal

os.getpid = lambda: 1  # the first process of a container
folder, name = Path(sys.argv[1]), sys.argv[2]
event, planned, link = StepEvent(0.2, 2.0), Ledger(), os.link
planned.record(event, 4)


def wait_for(what):
    while not (folder / what).exists():
        time.sleep(0.002)


def linked(part, path):
    (folder / f"{name} has written").touch()
    wait_for("both have written" if name == "first" else "first has linked")
    link(part, path)
    (folder / f"{name} has linked").touch()


journal.os.link = linked
if name == "second":
    wait_for("first has written")
try:
    one = journal.Journal.create(folder / "ledger.jsonl", 1e-5, "rdp", planned, {}, Ledger())
    for _ in range(4):
        one.record(event, None)
        print("released")
except CliplessError as error:
    print(error)
"""


def test_two_starters_with_one_process_number_do_not_write_one_file(tmp_path: Path) -> None:
    """As in two containers that share a volume. What is released is in the ledger."""
    script = tmp_path / "starter.py"
    script.write_text(STARTER)
    starters = [children.Child(script, tmp_path, name, cwd=tmp_path, notes=tmp_path) for name in ("first", "second")]
    for name in ("first", "second"):
        while not (tmp_path / f"{name} has written").exists():
            assert all(starter.poll() is None for starter in starters), [starter.done() for starter in starters]
            time.sleep(0.002)
    (tmp_path / "both have written").touch()
    said = [starter.done(60).stdout for starter in starters]
    released = sum(one.count("released") for one in said)
    assert released == len(read_ledger(tmp_path / "ledger.jsonl").entries) == 4
    assert any("exists already" in one for one in said)


def test_a_second_starter_is_refused(tmp_path: Path) -> None:
    planned = Ledger()
    planned.record(StepEvent(0.2, 2.0))
    create = lambda: Journal.create(tmp_path / "ledger.jsonl", 1e-5, "rdp", planned, {}, Ledger())  # noqa: E731
    first = create()
    with pytest.raises(InvalidArgument, match="exists already"):
        create()
    first.record(StepEvent(0.2, 2.0), None)
    first.close()
