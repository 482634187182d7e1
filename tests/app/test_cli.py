"""The command line as processes: exit codes, what is on stdout, the files a run leaves."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import children
import clipless
from clipless.app.cli import COMMANDS, app, main
from clipless.app.data import load
from clipless.app.training import TrainingSettings, train
from clipless.app.training.saving import Saving
from commanding import run_main

QUICK = ["train", "--model", "linear", "--epochs", "2", "--batch-size", "256"]
RUN = ["--dataset-size", "60000", "--batch-size", "600", "--epochs", "10", "--delta", "1e-6"]
ENVIRONMENT = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}


def in_process(*arguments: str) -> str:
    """Stdout of a command that has to succeed, run in this process."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_train_writes_a_run_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main(QUICK, tmp_path, capsys)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert "runs/digits-linear-auto-s/run.json" in done.stdout
    folder = tmp_path / "runs" / "digits-linear-auto-s"
    run = json.loads((folder / "run.json").read_text())
    assert run["private"] is True
    assert 0 < run["metrics"]["epsilon"] <= 3.0
    assert run["plan"]
    assert run["ledger"]
    assert {path.name for path in folder.iterdir()} == {"run.json", "model.pt", "ledger.jsonl", "config.toml"}


def test_train_json_is_all_of_stdout(tmp_path: Path) -> None:
    arguments = [*QUICK, "--clipping", "none", "--seed", "1", "--json", "--out", "here"]
    done = children.run("clipless.app.cli", *arguments, cwd=tmp_path, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    record = json.loads(done.stdout)
    assert record["private"] is False
    assert record["metrics"]["epsilon"] is None
    assert (tmp_path / record["run"]).is_file()
    assert (tmp_path / record["model"]).is_file()


def test_refusal_is_one_message_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main(["train", "--model", "liner"], tmp_path, capsys)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: unknown model 'liner': did you mean 'linear'?")
    assert "Traceback" not in done.stderr


def test_interrupt_exits_130_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(
        "import time\ndef make(shape, classes):\n    print('started', flush=True)\n    time.sleep(300)\n"
    )
    process = children.Child("clipless.app.cli", "train", "--model", "waiting:make", cwd=tmp_path, notes=tmp_path)
    process.wait_for("started\n")
    process.send_signal(signal.SIGINT)
    done = process.done(60)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_installed_script_is_the_same_program(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("clipless")
    done = subprocess.run([script, "--version"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "clipless 0.1.0\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--data", "digit"),
        ("--data", "nowhere/at/all"),
        ("--clipping", "autos"),
        ("--epsilon", "0"),
        ("--epsilon", "-1"),
        ("--epsilon", "nan"),
        ("--delta", "1"),
        ("--epochs", "0"),
        ("--batch-size", "5000"),
        ("--optimizer", "sdg"),
        ("--lr", "-0.1"),
        ("--seed", "-1"),
        ("--accountant", "plt"),
    ],
    ids=" ".join,
)
def test_train_refuses_and_writes_no_run(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(clipless.errors.CliplessError):
        CliRunner().invoke(app, [*QUICK, *arguments], catch_exceptions=False)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_same_seed_same_run(tmp_path: Path) -> None:
    arguments = [*QUICK, "--seed", "3", "--json", "--out"]
    first, second = (json.loads(in_process(*arguments, str(tmp_path / name))) for name in "ab")
    assert first["metrics"]["test_accuracy_per_epoch"] == second["metrics"]["test_accuracy_per_epoch"]
    assert (tmp_path / "a" / "model.pt").read_bytes() == (tmp_path / "b" / "model.pt").read_bytes()
    assert any("seed" in note for note in first["notes"])


def test_train_takes_a_table_and_a_model_of_the_current_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "\n".join(f"{i % 2},{(i % 2) * 2 - 1},{i % 2}" for i in range(60))
    (tmp_path / "table.csv").write_text(f"a,b,class\n{rows}\n")
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef make(shape, classes): return nn.Linear(*shape, classes)\n"
    )
    options = ["--data", "table.csv", "--target", "class", "--classes", "2", "--model", "mine:make"]
    options += ["--batch-size", "16", "--epochs", "1", "--json"]
    done = run_main(["train", *options], tmp_path, capsys)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["parameters"] == 6
    assert (tmp_path / "runs" / "table-mine.make-auto-s" / "run.json").is_file()


def test_budget_answers_both_questions_consistently() -> None:
    noise = json.loads(in_process("budget", "--epsilon", "2", *RUN, "--json"))
    assert noise["epsilon"] <= 2.0
    assert noise["steps"] == 1000
    assert noise["sample_rate"] == 0.01
    back = json.loads(in_process("budget", "--noise-multiplier", str(noise["noise_multiplier"]), *RUN, "--json"))
    assert back["epsilon"] == pytest.approx(2.0, rel=0.01)
    rate = ["--sample-rate", "0.01", "--steps", "1000", "--delta", "1e-6", "--json"]
    same = json.loads(in_process("budget", "--noise-multiplier", str(noise["noise_multiplier"]), *rate))
    assert same == back


def test_budget_equals_the_library() -> None:
    answer = json.loads(in_process("budget", "--noise-multiplier", "1.1", *RUN, "--accountant", "rdp", "--json"))
    assert answer["epsilon"] == clipless.epsilon(1.1, 0.01, 1000, 1e-6, accountant="rdp")


def test_budget_delta_defaults_to_the_size_of_the_data() -> None:
    for size, delta in (("1000", 1e-5), ("20000", 5e-6)):
        options = ["--noise-multiplier", "1", "--dataset-size", size, "--batch-size", "100", "--steps", "10", "--json"]
        answer = json.loads(in_process("budget", *options))
        assert (answer["delta"], answer["notes"]) == (delta, [])


@pytest.mark.parametrize(("accountant", "approximate"), [("gdp", True), ("pld", False), ("rdp", False)])
def test_budget_marks_the_approximation(accountant: str, approximate: bool) -> None:
    options = ["budget", "--noise-multiplier", "1.1", *RUN, "--accountant", accountant]
    result = CliRunner().invoke(app, options)
    assert ("approximation" in result.output) == approximate
    assert json.loads(in_process(*options, "--json"))["approximation"] == approximate


@pytest.mark.parametrize(("delta", "large"), [("0.0002", True), ("1e-4", False)])
def test_budget_warns_of_a_delta_above_a_tenth_of_one_over_n(delta: str, large: bool) -> None:
    options = ["budget", "--epsilon", "3", "--dataset-size", "1000", "--batch-size", "100", "--steps", "10"]
    options += ["--delta", delta]
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    assert (" ".join(result.stderr.split()).count("is above 1/(10 N) for N=1000") == 1) == large
    notes = json.loads(in_process(*options, "--json"))["notes"]
    assert ["delta up to 1/10000" in note for note in notes] == [True] * large


@pytest.mark.parametrize("size", ["1" + "0" * 400, "10"])
def test_budget_of_numbers_beyond_floats_is_refused(size: str) -> None:
    options = ["budget", "--epsilon", "3", "--dataset-size", size, "--sample-rate", "1e-310", "--epochs", "1"]
    with pytest.raises(clipless.errors.InvalidArgument, match="sample_rate|dataset-size"):
        CliRunner().invoke(app, options, catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "1", "--noise-multiplier", "1", *RUN], "either --noise-multiplier"),
        (RUN, "either --noise-multiplier"),
        (["--epsilon", "1", "--delta", "1e-5", "--epochs", "1"], "--sample-rate"),
        (["--epsilon", "1", "--delta", "1e-5", "--sample-rate", "0.1"], "--epochs or --steps"),
        (["--epsilon", "1", *RUN, "--steps", "5"], "--epochs or --steps"),
        (["--epsilon", "1", *RUN, "--sample-rate", "0.5"], "contradicts"),
        (["--epsilon", "1", "--sample-rate", "0.1", "--steps", "5"], "--delta is missing"),
        (["--epsilon", "1", "--sample-rate", "0.1", "--steps", "5", "--dataset-size", "0"], "--dataset-size is 0"),
        (["--epsilon", "1", "--sample-rate", "0", "--epochs", "5", "--delta", "1e-5"], "--sample-rate is 0"),
        (["--epsilon", "1", "--sample-rate", "1.5", "--steps", "5", "--delta", "1e-5"], "sample"),
        (["--epsilon", "1", "--sample-rate", "0.5", "--steps", "0", "--delta", "1e-5"], "steps"),
        (["--epsilon", "-1", *RUN], "epsilon"),
        (["--epsilon", "inf", *RUN], "epsilon"),
        (["--noise-multiplier", "0", *RUN], "noise"),
        (["--epsilon", "1", *RUN, "--delta", "1"], "delta"),
        (["--epsilon", "1", *RUN, "--accountant", "plt"], "did you mean 'pld'"),
        (["--epsilon", "1", "--dataset-size", "10", "--batch-size", "11", "--epochs", "1"], "--batch-size is 11"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_budget_refuses_with_a_remedy(arguments: list[str], message: str) -> None:
    with pytest.raises(clipless.errors.InvalidArgument, match=message):
        CliRunner().invoke(app, ["budget", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    text = in_process(command, "--help")
    example = re.search(rf"clipless {command} --.*", text)
    assert "Example:" in text
    assert example
    if command == "budget":
        in_process(*example.group().split()[1:])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_summary_of_a_command_is_the_first_line_of_its_help(command: str) -> None:
    function = getattr(importlib.import_module(f"clipless.app.cli.{command}"), command)
    assert COMMANDS[command].summary == str(function.__doc__).splitlines()[0]


def test_usage_errors_exit_2() -> None:
    for arguments in (["train", "--epsilon", "three"], ["train", "--no-such-option"], ["no-such-command"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2


# Ledgers.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished private run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    in_process(*QUICK, "--accountant", "rdp", "--seed", "1", "--json", "--out", str(folder))
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """What `clipless` with these arguments exits with."""
    monkeypatch.setattr(sys, "argv", ["clipless", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_report_says_what_was_promised_and_spent(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    report = json.loads(in_process("report", str(run), "--json"))
    assert report["state"] == "finished"
    assert report["promised"] == record["plan"]
    assert report["spent"] == {
        "epsilon": record["metrics"]["epsilon"],
        "delta": record["metrics"]["delta"],
        "steps": 12,
        "accountant": "rdp",
    }
    assert report["ledger"] == {"state": report["ledger"]["state"], "torn": False, **record["ledger_file"]}
    assert report["not_private"] == record["not_private"]
    table = in_process("report", str(run))
    for fragment in ("finished", "12 of 12", "zero-out", "auto-s", "source seeded", "whole"):
        assert fragment in table


def test_a_ledger_file_alone_can_be_read(run: Path) -> None:
    report = json.loads(in_process("report", str(run / "ledger.jsonl"), "--json", "--accountant", "pld"))
    budget = json.loads(in_process("budget", "--ledger", str(run / "ledger.jsonl"), "--json"))
    assert report["spent"]["epsilon"] == budget["epsilon"] < 3.0
    assert report["state"] == "all steps taken, not finished"
    assert (budget["torn"], budget["steps"], budget["accountant"]) == (False, 12, "pld")
    assert "Privacy spent" in in_process("budget", "--ledger", str(run))
    other = json.loads(in_process("budget", "--ledger", str(run), "--json", "--delta", "1e-7"))
    assert other["epsilon"] > budget["epsilon"]


@pytest.mark.parametrize("command", [["report"], ["budget", "--ledger"]], ids=" ".join)
def test_a_torn_last_line_is_shown_with_one_step_more_and_exit_code_3(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (run / "run.json").unlink()
    ledger = run / "ledger.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole[:-40])
    assert exit_code(monkeypatch, *command, str(run), "--json") == 3
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert found.get("spent", found)["steps"] == 12
    assert found.get("ledger", found)["torn"] is True
    assert "torn" in output.err
    assert exit_code(monkeypatch, *command, str(run)) == 3
    output = capsys.readouterr()
    assert "torn" in output.err
    assert "torn: counted as one more step" in output.out
    assert "whole" not in output.out


@pytest.mark.parametrize("command", [["report"], ["budget", "--ledger"]], ids=" ".join)
def test_a_damaged_ledger_is_exit_code_4_and_shows_no_epsilon(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    ledger = run / "ledger.jsonl"
    whole = ledger.read_bytes()
    for damaged in (whole.replace(b'"line": 5', b'"line": 6'), whole[:-40], b"".join(whole.splitlines(True)[:-3])):
        ledger.write_bytes(damaged)
        assert exit_code(monkeypatch, *command, str(run)) == 4
        output = capsys.readouterr()
        assert output.out == ""
        assert "epsilon" not in output.err.replace("do not trust the epsilon", "")


def test_a_cut_between_lines_is_found_by_a_hash_kept_elsewhere(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = run / "ledger.jsonl"
    head = json.loads((run / "run.json").read_text())["ledger_file"]["head"]
    in_process("report", str(ledger), "--head", head)
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(True)[:-3]))
    assert json.loads(in_process("report", str(ledger), "--json"))["spent"]["steps"] == 9
    for command in (["report"], ["budget", "--ledger"]):
        assert exit_code(monkeypatch, *command, str(ledger), "--head", head) == 4
    assert "cut short" in capsys.readouterr().err


def test_runs_without_a_ledger_file_are_reported_as_what_they_are(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of the library without `save_to`, and runs without privacy."""
    (run / "ledger.jsonl").unlink()
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"ledger_file": None}))
    report = json.loads(in_process("report", str(run), "--json"))
    assert report["spent"]["steps"] == 12
    assert "run.json only" in report["ledger"]["state"]
    in_process(*QUICK, "--clipping", "none", "--json", "--out", str(tmp_path / "none"))
    assert json.loads(in_process("report", str(tmp_path / "none"), "--json"))["private"] is False
    in_process("report", str(tmp_path / "none"))
    for arguments, message in (
        (["report", str(tmp_path)], "there is no run"),
        (["report", str(tmp_path / "nothing")], "cannot read"),
        (["report", str(run), "--head", "0"], "no ledger.jsonl"),
        (["budget", "--ledger", str(tmp_path / "none")], "not private"),
        (["budget", "--ledger", str(run), "--steps", "3"], "--ledger describes its whole run"),
    ):
        with pytest.raises(clipless.errors.InvalidArgument, match=message):
            CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_finished_run_says_so_when_resumed(run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    (run / "checkpoint.pt").write_bytes(b"left by a crash")
    result = CliRunner().invoke(app, ["train", "--resume", "--out", str(run)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "is finished" in result.stderr
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_resume_begins_a_run_where_there_is_none_and_secure_noise_takes_no_seed(tmp_path: Path) -> None:
    options = [*QUICK, "--accountant", "rdp", "--json", "--resume", "--noise", "secure", "--out", str(tmp_path / "a")]
    assert json.loads(in_process(*options))["plan"]["noise"] == "secure"
    with pytest.raises(clipless.errors.InvalidArgument, match="takes no seed"):
        CliRunner().invoke(app, [*QUICK, "--noise", "secure", "--seed", "1"], catch_exceptions=False)


def test_resume_takes_the_arguments_the_run_was_begun_with(tmp_path: Path) -> None:
    settings = TrainingSettings(model="linear", epochs=2, batch_size=256, accountant="rdp", lr=0.05, seed=4)
    asked = iter([False, False, False, True])
    with pytest.raises(clipless.errors.Interrupted):
        train(load("digits"), settings, saving=Saving(tmp_path, data="digits"), stop=lambda: next(asked))
    for option in (["--lr", "0.3"], ["--epsilon", "2"], ["--batch-size", "128"]):
        with pytest.raises(clipless.errors.InvalidArgument, match="other arguments"):
            CliRunner().invoke(app, ["train", "--resume", "--out", str(tmp_path), *option], catch_exceptions=False)
    with pytest.raises(clipless.errors.InvalidArgument, match="--resume"):
        CliRunner().invoke(app, ["train", "--out", str(tmp_path)], catch_exceptions=False)
    report = json.loads(in_process("report", str(tmp_path), "--json"))
    assert (report["state"], report["spent"]["steps"], list(report["not_private"])) == (
        "unfinished",
        3,
        ["checkpoint.pt"],
    )
    in_process("train", "--resume", "--out", str(tmp_path), "--lr", "0.05", "--json")
    record = json.loads((tmp_path / "run.json").read_text())
    assert TrainingSettings(**record["arguments"]) == settings
    assert record["metrics"]["steps"] == 12
