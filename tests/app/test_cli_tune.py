"""`clipless tune` as people and scripts use it."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import children
from clipless.accounting.selection import METHODS
from clipless.app.cli import app
from clipless.runs.ledger_file import read_ledger
from commanding import run_main

QUICK = ["tune", "--model", "linear", "--epochs", "1", "--batch-size", "256", "--epsilon", "6", "--try", "lr=0.001,0.5"]
ENVIRONMENT = {"COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def in_process(*arguments: str) -> tuple[str, str]:
    """Stdout and stderr of a command that has to succeed, run in this process."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.mark.parametrize("method", METHODS)
def test_every_method_from_the_grid_to_the_report(method: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown, notes = in_process(*QUICK, "--method", method, "--out", str(out))
    assert "for the whole search" in shown
    assert "the guarantee does not cover them" in notes
    assert {path.name for path in out.iterdir()} == {"ledger.jsonl", "model.pt", "run.json", "config.toml"}
    record = json.loads((out / "run.json").read_text())
    found = read_ledger(out / "ledger.jsonl")
    assert 0.99 * 6 <= found.spent().epsilon == record["metrics"]["epsilon"] <= 6
    assert record["tuning"]["method"] == method
    assert "test records" in record["tuning"]["score"]
    assert record["plan"]["epsilon"] == 6
    assert record["arguments"]["seed"] is None
    reported = json.loads(in_process("report", str(out), "--json")[0])
    assert reported["state"] == "finished"
    assert reported["spent"]["epsilon"] == found.spent().epsilon
    assert f"chosen by {method}" in in_process("report", str(out))[0]


def test_a_process_shows_nothing_of_the_losers(tmp_path: Path) -> None:
    """Everything that is written anywhere: no accuracy but the released run's, no bar, no number of runs."""
    arguments = [*QUICK, "--method", "papernot-steinke", "--out", "out", "--seed", "3"]
    done = children.run("clipless.app.cli", *arguments, cwd=tmp_path, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    written = "".join(path.read_text() for path in (tmp_path / "out").glob("*.json*"))
    own = {f"{record['metrics']['test_accuracy']:.2%}"}
    assert set(re.findall(r"\d+\.\d\d%", done.stdout + done.stderr)) == own
    assert "whoever knows it can subtract the noise" in done.stderr
    assert "Keep to yourself how long this took" in done.stderr
    assert "tuning ━" not in done.stderr
    assert "scores" not in written
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_json_is_all_of_stdout_and_a_grid_shows_all_scores(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text('[grid]\nlr = [0.001, 0.5]\n[settings]\nmodel = "linear"\nepochs = 7\n')
    shown, notes = in_process(
        "tune",
        "--grid",
        str(path),
        "--epochs",
        "1",
        "--epsilon",
        "6",
        "--method",
        "grid",
        "--json",
        "--out",
        str(tmp_path),
    )
    assert notes == ""
    record = json.loads(shown)
    assert [one["lr"] for one in record["tuning"]["candidates"]] == [0.001, 0.5]
    assert len(record["tuning"]["scores"]) == 2
    assert record["metrics"]["test_accuracy"] == max(record["tuning"]["scores"])
    assert record["tuning"]["run"]["steps"] == 6  # the flag wins over the file
    assert Path(record["run"]).is_file()


def test_a_dry_run_shows_the_price_and_spends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown, _ = in_process(*QUICK, "--dry-run")
    for name in METHODS:
        assert name in shown
    assert "needs the least noise for the same total" in shown
    answer = json.loads(in_process(*QUICK, "--dry-run", "--json")[0])
    assert set(answer["prices"]) == set(METHODS)
    noise = {name: figures["noise_multiplier"] for name, figures in answer["prices"].items()}
    assert answer["method"] == min(noise, key=lambda name: noise[name])
    assert all(5.94 <= figures["epsilon"] <= 6 for figures in answer["prices"].values())
    assert not list(tmp_path.iterdir())


def test_ctrl_c_says_what_stays_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("clipless.app.tuning.worker.train", interrupted)
    done = run_main([*QUICK, "--method", "grid", "--accountant", "rdp", "--out", "out"], tmp_path, capsys)
    assert done.returncode == 130
    assert "nothing is released" in done.stderr
    assert "what it spent stays spent: out/ledger.jsonl." in done.stderr
    assert read_ledger(tmp_path / "out" / "ledger.jsonl").entries


def test_a_grid_file_without_a_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text("[settings]\nepochs = 1\n")
    result = CliRunner().invoke(app, ["tune", "--grid", str(tmp_path / "grid.toml"), "--dry-run"])
    assert "nothing to try" in str(result.exception)


@pytest.mark.parametrize(("delta", "large"), [("8e-5", True), ("6e-5", False)])
def test_a_dry_run_warns_once_of_a_delta_above_a_tenth_of_one_over_n(delta: str, large: bool) -> None:
    shown = in_process(*QUICK, "--dry-run", "--delta", delta)[1]
    assert " ".join(shown.split()).count("is above 1/(10 N) for N=1437") == large
    notes = json.loads(in_process(*QUICK, "--dry-run", "--delta", delta, "--json")[0])["notes"]
    assert ["delta up to 1/14370" in note for note in notes] == [True] * large


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--try", "lr"], "names no values"),
        (["--try", "epsilon=1,2"], "cannot be tried"),
        (["--try", "lr=0.1", "--method", "gird"], "did you mean 'grid'"),
        (["--try", "lr=0.1", "--accountant", "gdp"], "take 'pld' or 'rdp'"),
        (["--try", "lr=0.1", "--executor", "dask"], "belong together"),
        (["--try", "lr=-1"], "lr is -1.0"),
        (["--try", "clipping=auto-s,none"], "cannot be one of the candidates"),
        (["--grid", "nowhere.toml"], "cannot read the grid"),
        ([], "nothing to try: give --try"),
        (["--dry-run"], "nothing to try: give --try"),
        (["--clipping", "dc-e", "--lr", "0.1"], "nothing to try: give --try"),
    ],
)
def test_refusals_leave_nothing_behind(arguments: list[str], message: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["tune", "--model", "linear", "--epochs", "1", "--out", str(out), *arguments])
    assert result.exit_code != 0
    assert message in str(result.exception)
    assert not (out / "ledger.jsonl").exists()


SLOW = """
import time
from torch import nn

class Slow(nn.Linear):
    def forward(self, x):
        if self.training:
            print("training", flush=True)
            time.sleep(300)
        return super().forward(x.flatten(1))

def make(shape, classes):
    return Slow(64, classes)
"""


def started(folder: Path, *options: str) -> children.Child:
    """A search that is training, and will be for long."""
    (folder / "slow.py").write_text(SLOW)
    arguments = [*QUICK, "--model", "slow:make", "--out", "out", *options]
    notes = folder / "notes"
    notes.mkdir()
    process = children.Child("clipless.app.cli", *arguments, cwd=folder, notes=notes, environment=ENVIRONMENT)
    process.wait_for("training\n")
    return process


def test_a_killed_search_is_counted_whole(tmp_path: Path) -> None:
    process = started(tmp_path, "--method", "liu-talwar")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"ledger.jsonl"}
    assert 5.94 <= read_ledger(tmp_path / "out" / "ledger.jsonl").spent().epsilon <= 6
    assert "unfinished" in in_process("report", str(tmp_path / "out"))[0]
    again = CliRunner().invoke(app, [*QUICK, "--out", str(tmp_path / "out")])
    assert "what it spent stays spent" in str(again.exception)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for child processes in /proc")
def test_an_interrupt_ends_workers_too(tmp_path: Path) -> None:
    process = started(tmp_path, "--executor", "processes", "--workers", "1")
    workers = [
        int(pid)
        for task in Path(f"/proc/{process.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    process.send_signal(signal.SIGINT)
    done = process.done(60)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    for _ in range(100):
        if not any(map(alive, workers)):
            break
        time.sleep(0.1)
    assert workers
    assert not any(map(alive, workers))
