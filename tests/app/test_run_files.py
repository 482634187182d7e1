"""The files of a run as processes leave them: a ledger is never replaced, edits are found, and nothing after the last step
loses a run."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import children
from clipless.app.terminal import streams
from clipless.runs.ledger_file import read_ledger, sealed

ENVIRONMENT = {"COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
QUICK = ["train", "--model", "linear", "--epochs", "1", "--batch-size", "256", "--accountant", "rdp"]
TABLE = "a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(100))


def clipless(folder: Path, *arguments: str, **further: Any) -> children.Done:
    return children.run("clipless.app.cli", *arguments, cwd=folder, environment=ENVIRONMENT, **further)


def started(folder: Path, *arguments: str | bytes, **streams: Any) -> "subprocess.Popen[bytes]":
    """The program with streams of its own."""
    command = [sys.executable, "-m", "clipless", *arguments]
    python = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "error::ResourceWarning"}
    return subprocess.Popen(command, cwd=folder, env=os.environ | ENVIRONMENT | python, **streams)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    done = clipless(folder, *QUICK, "--noise-multiplier", "1.205", "--out", "run")
    assert done.returncode == 0, done.stderr
    return folder


# One folder, one run.


@pytest.mark.parametrize("clipping", ["auto-s", "abadi", "none"])
def test_a_finished_run_is_never_replaced(finished: Path, clipping: str) -> None:
    before = contents(finished / "run")
    done = clipless(finished, *QUICK, "--clipping", clipping, "--out", "run")
    assert done.returncode == 2
    assert "run holds a finished run, and its ledger has to be kept: choose another folder (--out)." in done.stderr
    assert contents(finished / "run") == before


@pytest.mark.parametrize("clipping", ["auto-s", "none"])
@pytest.mark.parametrize("kept", [("ledger.jsonl", "checkpoint.pt"), ("ledger.jsonl",), ("checkpoint.pt",)])
def test_an_unfinished_run_is_never_replaced(tmp_path: Path, finished: Path, clipping: str, kept: tuple[str]) -> None:
    (tmp_path / "run").mkdir()
    for name in kept:
        source = finished / "run" / ("ledger.jsonl" if name.endswith("l") else "model.pt")
        (tmp_path / "run" / name).write_bytes(source.read_bytes())
    before = contents(tmp_path / "run")
    done = clipless(tmp_path, *QUICK, "--clipping", clipping, "--out", "run")
    assert done.returncode == 2
    assert "run holds an interrupted run: resume it (--resume), or choose another folder (--out)." in done.stderr
    assert contents(tmp_path / "run") == before


def test_a_search_replaces_no_run(finished: Path) -> None:
    before = contents(finished / "run")
    done = clipless(finished, "tune", "--try", "lr=0.1,0.2", "--model", "linear", "--epochs", "1", "--out", "run")
    assert done.returncode == 2
    assert "choose another folder (--out)" in done.stderr
    assert contents(finished / "run") == before


def test_a_run_without_privacy_may_be_replaced_and_is_kept(tmp_path: Path) -> None:
    for _ in range(2):
        assert clipless(tmp_path, *QUICK, "--clipping", "none", "--out", "run").returncode == 0
    names = {"run.json", "run.1.json", "model.pt", "model.1.pt", "config.toml", "config.1.toml"}
    assert contents(tmp_path / "run").keys() == names


def test_the_duration_of_a_run_is_not_private(finished: Path) -> None:
    record = json.loads((finished / "run" / "run.json").read_text())
    assert record["metrics"]["seconds"] > 0
    assert "grows with the batch" in record["not_private"]["metrics.seconds"]
    assert "Not private: metrics.seconds" in clipless(finished, "report", "run").stderr


# Edited files.


def edited(record: Any, path: str, value: object) -> Any:
    """A copy with another value at `plan.epsilon` or the like."""
    copy = json.loads(json.dumps(record))
    *groups, name = path.split(".")
    place = copy
    for group in groups:
        place = place[int(group) if isinstance(place, list) else group]
    assert place[name] != value
    place[name] = value
    return copy


def sealed_again(lines: list[dict[str, Any]]) -> bytes:
    """A ledger of these lines with hashes that fit."""
    found, previous = b"", ""
    for line in lines:
        fields = {name: value for name, value in line.items() if name != "hash"} | {"previous": previous}
        content, previous = sealed(fields)
        found += content
    return found


def copied(finished: Path, folder: Path) -> Path:
    (folder / "run").mkdir()
    for name, content in contents(finished / "run").items():
        (folder / "run" / name).write_bytes(content)
    return folder / "run"


def refused(folder: Path) -> str:
    """Why nothing of the run is shown, by any command."""
    for arguments in (["report", "run", "--html", "page.html"], ["budget", "--ledger", "run"]):
        done = clipless(folder, *arguments)
        assert (done.returncode, done.stdout) == (4, ""), done
        assert "spent" not in done.stderr
    assert not (folder / "page.html").exists()
    return done.stderr


def test_a_deleted_ledger_is_missed(tmp_path: Path, finished: Path) -> None:
    run = copied(finished, tmp_path)
    (run / "ledger.jsonl").unlink()
    assert "ledger.jsonl is missing" in refused(tmp_path)
    record = json.loads((run / "run.json").read_text())
    for event in record["ledger"]["events"]:
        event["event"]["gradient_multiplier"] = 50.0
    (run / "run.json").write_text(json.dumps(edited(record, "plan.noise_multiplier", 50.0)))
    assert "do not trust any epsilon" in refused(tmp_path)
    assert clipless(tmp_path, *QUICK, "--out", "run").returncode == 4


def test_the_ledger_of_another_run_is_not_taken_for_this_one(tmp_path: Path, finished: Path) -> None:
    run = copied(finished, tmp_path)
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_bytes().splitlines()]
    (run / "ledger.jsonl").write_bytes(sealed_again([lines[0] | {"run": "0" * 32}, *lines[1:]]))
    assert "is not the ledger of the run" in refused(tmp_path)


HEADERS: dict[str, tuple[str, object]] = {
    "multiplier": ("plan.noise_multiplier", 99.0),
    "rate": ("plan.sample_rate", 0.001),
    "promise": ("plan.epsilon", 0.1),
    "delta of the plan": ("plan.delta", 1e-9),
    "accountant of the plan": ("plan.accountant", "pld"),
    "steps of the plan": ("plan.steps", 1),
    "planned steps": ("planned.events.0.count", 3),
    "planned noise": ("planned.events.0.event.gradient_multiplier", 99.0),
    "planned rate": ("planned.events.0.event.sample_rate", 0.01),
    "projections": ("plan.projections", 20),
}


@pytest.mark.parametrize("change", HEADERS)
def test_a_plan_that_its_events_contradict_is_found_although_every_hash_fits(
    tmp_path: Path, finished: Path, change: str
) -> None:
    run = copied(finished, tmp_path)
    (run / "run.json").unlink()
    header, *lines = [json.loads(line) for line in (run / "ledger.jsonl").read_bytes().splitlines()]
    path, value = HEADERS[change]
    if change == "projections":
        header["plan"]["projections"] = None
    (run / "ledger.jsonl").write_bytes(sealed_again([edited(header, path, value), *lines]))
    assert "1.205" not in refused(tmp_path)


@pytest.mark.parametrize("field", ["sample_rate", "gradient_multiplier"])
@pytest.mark.parametrize("number", [1, 4])
def test_an_event_that_was_not_planned_is_found(tmp_path: Path, finished: Path, field: str, number: int) -> None:
    run = copied(finished, tmp_path)
    (run / "run.json").unlink()
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_bytes().splitlines()]
    lines[number] = edited(lines[number], f"event.{field}", 0.1 if field == "sample_rate" else 99.0)
    (run / "ledger.jsonl").write_bytes(sealed_again(lines))
    assert f"line {number + 1} of" in refused(tmp_path)


@pytest.mark.parametrize(
    ("path", "value"),
    [("plan.noise_multiplier", 50.0), ("plan.steps", 7), ("plan.epsilon", 0.1), ("metrics.epsilon", 0.025)],
)
def test_a_record_that_its_ledger_contradicts_is_found(
    tmp_path: Path, finished: Path, path: str, value: object
) -> None:
    run = copied(finished, tmp_path)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(edited(record, path, value)))
    assert "do not trust any epsilon" in refused(tmp_path)
    done = clipless(tmp_path, "train", "--resume", "--out", "run", "--json")
    assert (done.returncode, done.stdout) == (4, "")


def test_a_ledger_that_is_only_sealed_again_is_read(tmp_path: Path, finished: Path) -> None:
    """What the tests above change is what makes the difference."""
    run = copied(finished, tmp_path)
    (run / "run.json").unlink()
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_bytes().splitlines()]
    (run / "ledger.jsonl").write_bytes(sealed_again(lines))
    assert clipless(tmp_path, "report", "run").returncode == 0


def test_a_plan_without_a_ledger_is_compared_with_its_events_too(tmp_path: Path, finished: Path) -> None:
    run = copied(finished, tmp_path)
    (run / "ledger.jsonl").unlink()
    record = json.loads((run / "run.json").read_text()) | {"ledger_file": None}
    (run / "run.json").write_text(json.dumps(record))
    assert clipless(tmp_path, "report", "run").returncode == 0
    for path, value in (("plan.noise_multiplier", 99.0), ("plan.epsilon", 0.1)):
        (run / "run.json").write_text(json.dumps(edited(record, path, value)))
        assert "were edited" in refused(tmp_path)
    del record["plan"]["delta"]
    (run / "run.json").write_text(json.dumps(record))
    assert "is incomplete" in refused(tmp_path)


# The streams.


def closed_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


UNWRITABLE: dict[str, Callable[[], int]] = {
    "full": lambda: os.open("/dev/full", os.O_WRONLY),
    "pipe that nobody reads": closed_pipe,
    "open for reading": lambda: os.open(os.devnull, os.O_RDONLY),
}


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("kind", UNWRITABLE)
def test_a_stream_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path, kind: str, name: str) -> None:
    with os.fdopen(UNWRITABLE[kind](), "rb") as stream:
        other = {"stdout": "stderr", "stderr": "stdout"}[name]
        process = started(tmp_path, *QUICK, "--out", "run", **{name: stream, other: subprocess.PIPE})
        out, errors = process.communicate()
    assert process.returncode == 2
    assert not (tmp_path / "run").exists()
    assert name == "stderr" or b"standard output cannot be written" in errors
    assert not out


def test_a_file_on_a_full_disk_is_no_place_for_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "out.txt", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        streams.refuse_unwritable()
        full = os.statvfs_result([4096, 4096, 10, 3, 0, 10, 3, 0, 0, 255])
        monkeypatch.setattr(os, "fstatvfs", lambda _: full)
        with pytest.raises(ValueError, match="No space left on device"):
            streams.refuse_unwritable()


def test_closed_streams_are_no_place_for_a_ledger(tmp_path: Path) -> None:
    """What is opened next would otherwise take the number of standard output, and be written by whoever prints."""
    (tmp_path / "loud.py").write_text(
        "import os\nfrom torch import nn\n"
        "class Loud(nn.Module):\n    def forward(self, x):\n"
        "        [os.write(n, b'printed') for n in (1, 2)]\n        return x\n"
        "def make(shape, classes): return nn.Sequential(Loud(), nn.Flatten(), nn.Linear(64, classes))\n"
    )
    command = f"{sys.executable} -m clipless {' '.join(QUICK)} --model loud:make --out run <&- >&- 2>&-"
    python = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, shell=True, cwd=tmp_path, env=os.environ | ENVIRONMENT | python, check=True)
    assert all(b"printed" not in content for content in contents(tmp_path / "run").values())
    assert len(read_ledger(tmp_path / "run" / "ledger.jsonl").entries) == 6


LOSING = """
import os
from pathlib import Path

import torch
from torch import nn


class Losing(nn.Module):
    '''Takes the output away, or the place of a file, at the test after the last step.'''

    def forward(self, x):
        if len(x) > 300 and not self.training and Path("lose").exists():
            kind = Path("lose").read_text()
            if kind == "full":
                os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
            elif kind == "pipe":
                read, write = os.pipe()
                os.dup2(write, 1)
                os.close(write)
                os.close(read)
            elif kind == "test":
                raise RuntimeError("the test failed")
            else:
                Path("run", kind).mkdir(exist_ok=True)
        return x


def make(shape, classes):
    return nn.Sequential(Losing(), nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture
def losing(tmp_path: Path) -> Path:
    (tmp_path / "losing.py").write_text(LOSING)
    return tmp_path


LOSE = [*QUICK, "--model", "losing:make", "--out", "run"]


@pytest.mark.parametrize(("kind", "shape"), [("full", []), ("pipe", ["--json"])], ids=["full", "pipe"])
def test_output_that_fails_at_the_end_loses_no_run_and_asks_for_no_other(
    losing: Path, kind: str, shape: list[str]
) -> None:
    (losing / "lose").write_text(kind)
    process = started(losing, *LOSE, *shape, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, errors = process.communicate()
    assert (process.returncode, out) == (1, b"")
    last = errors.decode().splitlines()[-1]
    assert "the run is finished and saved in run" in last
    assert "Do not run it again. To see it:  clipless report run" in last
    assert b"Exception ignored" not in errors
    assert contents(losing / "run").keys() == {"run.json", "model.pt", "ledger.jsonl", "config.toml"}
    assert clipless(losing, "report", "run").returncode == 0
    before = contents(losing / "run")
    assert clipless(losing, *LOSE).returncode == 2
    assert contents(losing / "run") == before


@pytest.mark.parametrize("place", ["model.pt", "config.toml", "run.json", "test"])
def test_a_run_whose_end_fails_is_finished_later_without_another_step(losing: Path, place: str) -> None:
    (losing / "lose").write_text(place)
    done = clipless(losing, *LOSE)
    assert done.returncode == (1 if place == "test" else 2)
    assert place == "test" or "clipless train --resume --out run" in done.stderr
    assert "again" not in done.stderr
    taken = read_ledger(losing / "run" / "ledger.jsonl")
    assert len(taken.entries) == 6
    (losing / "lose").unlink()
    if place != "test":
        (losing / "run" / place).rmdir()
    done = clipless(losing, "train", "--resume", "--out", "run", "--json")
    assert done.returncode == 0, done.stderr
    assert read_ledger(losing / "run" / "ledger.jsonl").head == taken.head
    assert contents(losing / "run").keys() == {"run.json", "model.pt", "ledger.jsonl", "config.toml"}


def test_a_run_that_was_killed_in_its_last_test_has_its_last_step(losing: Path) -> None:
    """Also when it goes on with new noise: no step is lost."""
    assert clipless(losing, *LOSE[:-1], "whole", "--seed", "1").returncode == 0
    (losing / "losing.py").write_text(
        LOSING.replace('raise RuntimeError("the test failed")', f"os.kill(os.getpid(), {int(signal.SIGKILL)})")
    )
    (losing / "lose").write_text("test")
    assert clipless(losing, *LOSE, "--seed", "1").returncode == -signal.SIGKILL
    head = read_ledger(losing / "run" / "ledger.jsonl").head
    (losing / "lose").unlink()
    assert clipless(losing, "train", "--resume", "--reseed", "--out", "run").returncode == 0
    assert read_ledger(losing / "run" / "ledger.jsonl").head == head
    assert (losing / "run" / "model.pt").read_bytes() == (losing / "whole" / "model.pt").read_bytes()


# Names.


@pytest.mark.parametrize("option", ["--data", "--test"])
def test_a_name_that_is_no_text_is_refused_before_the_first_step(tmp_path: Path, option: str) -> None:
    strange = b"caf\xe9.csv"
    for name in (strange, b"plain.csv"):
        (tmp_path / os.fsdecode(name)).write_text(TABLE)
    data = [b"--data", strange] if option == "--data" else [b"--data", b"plain.csv", b"--test", strange]
    rest = [b"--target", b"y", b"--classes", b"2", b"--batch-size", b"32", b"--out", b"run"]
    process = started(tmp_path, *QUICK, *data, *rest, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, errors = process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert f"{option} is not UTF-8 text".encode() in errors
    assert not (tmp_path / "run").exists()


def test_a_folder_whose_name_is_no_text_holds_a_whole_run(tmp_path: Path) -> None:
    strange = b"caf\xe9"
    for arguments in ([*QUICK, "--out", strange], ["report", strange, "--html", "page.html"]):
        process = started(tmp_path, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        assert out
    assert contents(tmp_path / os.fsdecode(strange)).keys() == {"run.json", "model.pt", "ledger.jsonl", "config.toml"}


def test_characters_that_the_terminal_has_no_code_for_are_shown_as_escapes(tmp_path: Path) -> None:
    (tmp_path / "größe.csv").write_text(TABLE)
    options = ["--data", "größe.csv", "--target", "y", "--classes", "2", "--batch-size", "32", "--out", "run"]
    python = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "clipless", *QUICK, *options]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | ENVIRONMENT | python, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert rb"gr\xf6\xdfe" in done.stdout


def test_data_that_run_json_could_not_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    code = (
        "from dataclasses import replace\nimport torch\nfrom clipless.app.data import load as named\n"
        "def columns(): return replace(named('digits'), columns={'x': torch.ones(2)})\n"
        "def name(): return replace(named('digits'), name='caf\\udce9')\n"
    )
    (tmp_path / "mine.py").write_text(code)
    for function in ("columns", "name"):
        done = clipless(tmp_path, *QUICK, "--data", f"mine:{function}", "--out", "run")
        assert done.returncode == 2
        assert "cannot be stored in run.json" in done.stderr
        assert not (tmp_path / "run" / "ledger.jsonl").exists()


# TensorBoard.


def test_the_time_of_a_step_is_not_in_the_tensorboard_files(tmp_path: Path) -> None:
    """A step on many records takes longer. Two processes: what the command writes, and how slow steps look."""
    (tmp_path / "slow.py").write_text(
        "import time\nfrom torch import nn\n"
        "class Slow(nn.Module):\n    def forward(self, x):\n"
        "        time.sleep(2e-4 * len(x) * self.training)\n        return x\n"
        "def make(shape, classes): return nn.Sequential(Slow(), nn.Flatten(), nn.Linear(64, classes))\n"
    )
    done = clipless(tmp_path, *QUICK, "--epochs", "2", "--model", "slow:make", "--tensorboard", "board", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["metrics"]["seconds"] > 0.3
    (file,) = (tmp_path / "board").iterdir()
    times = Counter(event.wall_time for event in EventFileLoader(str(file)).Load() if event.HasField("summary"))
    assert len(times) == 1
    assert times.total() >= 16
    scalars = EventAccumulator(str(tmp_path / "board")).Reload()
    assert {one.step for one in scalars.Scalars("private/threshold")} == set(range(1, 13))


def test_a_board_that_cannot_be_written_does_not_end_a_run(tmp_path: Path) -> None:
    """Its file becomes one to which nothing can be written, as on a full disk."""
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\nfrom torch import nn\n"
        "class Full(nn.Module):\n    def forward(self, x):\n"
        "        for file in Path('board').iterdir():\n"
        "            file.unlink()\n            file.symlink_to('/dev/full')\n"
        "        return x\n"
        "def make(shape, classes): return nn.Sequential(Full(), nn.Flatten(), nn.Linear(64, classes))\n"
    )
    done = clipless(tmp_path, *QUICK, "--model", "mine:make", "--tensorboard", "board", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "the TensorBoard files are not complete" in done.stderr
    assert len(read_ledger(tmp_path / "run" / "ledger.jsonl").entries) == 6
