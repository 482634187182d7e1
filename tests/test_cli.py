"""The command line as processes: exit codes, what is on stdout, the files a run leaves."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import clipless
from clipless.cli import app

QUICK = ["train", "--model", "linear", "--epochs", "2", "--batch-size", "256"]
RUN = ["--dataset-size", "60000", "--batch-size", "600", "--epochs", "10", "--delta", "1e-5"]
ENVIRONMENT = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
COMMAND = [sys.executable, "-m", "clipless.cli"]


def clipless_process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def in_process(*arguments: str) -> str:
    """Stdout of a command that has to succeed, run in this process."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_train_writes_a_run_and_says_where(tmp_path: Path) -> None:
    done = clipless_process(*QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert "runs/digits-linear-auto-s/run.json" in done.stdout
    folder = tmp_path / "runs" / "digits-linear-auto-s"
    run = json.loads((folder / "run.json").read_text())
    assert run["private"] is True
    assert 0 < run["metrics"]["epsilon"] <= 3.0
    assert run["plan"]
    assert run["ledger"]
    assert {path.name for path in folder.iterdir()} == {"run.json", "model.pt", "ledger.jsonl"}


def test_train_json_is_all_of_stdout(tmp_path: Path) -> None:
    done = clipless_process(*QUICK, "--clipping", "none", "--seed", "1", "--json", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    record = json.loads(done.stdout)
    assert record["private"] is False
    assert record["metrics"]["epsilon"] is None
    assert (tmp_path / record["run"]).is_file()
    assert (tmp_path / record["model"]).is_file()


def test_refusal_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    done = clipless_process("train", "--model", "liner", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: unknown model 'liner': did you mean 'linear'?")
    assert "Traceback" not in done.stderr


def heed_interrupts() -> None:
    """A process started in the background of a script ignores interrupts, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupt_exits_130_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(
        "import time\ndef make(shape, classes):\n    print('started', flush=True)\n    time.sleep(300)\n"
    )
    arguments = [*COMMAND, "train", "--model", "waiting:make"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        arguments, cwd=tmp_path, env=ENVIRONMENT, text=True, preexec_fn=heed_interrupts, **pipes
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "started\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors


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


def test_train_takes_a_table_and_a_model_of_the_current_folder(tmp_path: Path) -> None:
    rows = "\n".join(f"{i % 2},{(i % 2) * 2 - 1},{i % 2}" for i in range(60))
    (tmp_path / "table.csv").write_text(f"a,b,class\n{rows}\n")
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef make(shape, classes): return nn.Linear(*shape, classes)\n"
    )
    options = ["--data", "table.csv", "--model", "mine:make", "--batch-size", "16", "--epochs", "1", "--json"]
    done = clipless_process("train", *options, cwd=tmp_path)
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
    rate = ["--sample-rate", "0.01", "--steps", "1000", "--delta", "1e-5", "--json"]
    same = json.loads(in_process("budget", "--noise-multiplier", str(noise["noise_multiplier"]), *rate))
    assert same == back


def test_budget_equals_the_library() -> None:
    answer = json.loads(in_process("budget", "--noise-multiplier", "1.1", *RUN, "--accountant", "rdp", "--json"))
    assert answer["epsilon"] == clipless.epsilon(1.1, 0.01, 1000, 1e-5, accountant="rdp")


def test_budget_delta_defaults_to_the_size_of_the_data() -> None:
    options = ["--noise-multiplier", "1", "--dataset-size", "1000", "--batch-size", "100", "--steps", "10", "--json"]
    assert json.loads(in_process("budget", *options))["delta"] == pytest.approx(1000**-1.1)


@pytest.mark.parametrize(("accountant", "approximate"), [("gdp", True), ("pld", False), ("rdp", False)])
def test_budget_marks_the_approximation(accountant: str, approximate: bool) -> None:
    options = ["budget", "--noise-multiplier", "1.1", *RUN, "--accountant", accountant]
    result = CliRunner().invoke(app, options)
    assert ("approximation" in result.output) == approximate
    assert json.loads(in_process(*options, "--json"))["approximation"] == approximate


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


@pytest.mark.parametrize("command", [command.callback.__name__ for command in app.registered_commands])
def test_help_has_an_example_that_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    text = in_process(command, "--help")
    example = re.search(rf"clipless {command} --.*", text)
    assert "Example:" in text
    assert example
    if command == "budget":
        in_process(*example.group().split()[1:])


def test_usage_errors_exit_2() -> None:
    for arguments in (["train", "--epsilon", "three"], ["train", "--no-such-option"], ["no-such-command"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2
