"""Every command of the registry: its help, a right use, wrong ones, and what they print. A new command is added here."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clipless.app.cli import COMMANDS, EXIT_CODES, app
from clipless.app.terminal import output
from commanding import Done, run_main

TABLE = "age,job,paid\n" + "".join(f"{20 + i},{'cook' if i % 3 else 'clerk'},{i % 2}\n" for i in range(40))
QUICK = ["--model", "linear", "--epochs", "1", "--batch-size", "256", "--accountant", "rdp"]
BENCH = ["--models", "tabular", "--quick", "--rounds", "1", "--no-memory", "--no-opacus", "--scaling", "none"]
BENCH += ["--clippings", "auto-s", "--warm-up", "1"]

MINE = """
import torch
def scalar(shape, classes):
    return torch.nn.Sequential(torch.nn.Linear(*shape, 1), torch.nn.Flatten(0))
def numbers():
    part = (torch.randn(300, 2), torch.randn(300, 1))
    return {"train": part, "test": part, "task": "regression"}
"""

# A right use, and what it prints on stdout.
RIGHT: dict[str, tuple[list[str], str]] = {
    "train": (QUICK, "test accuracy (not private)"),
    "schema": (["table.csv", "--target", "paid"], 'categories = ["0", "1"]'),
    "budget": (["--noise-multiplier", "1", "--sample-rate", "0.1", "--steps", "10", "--delta", "1e-5"], "epsilon"),
    "check": (["--model", "linear"], "sound"),
    "audit": ([*QUICK, "--games", "step", "--releases", "100"], "nothing speaks against the claim"),
    "bench": (BENCH, "Time of a training step"),
    "tune": (["--try", "lr=0.1,0.2", "--model", "linear", "--epochs", "1", "--dry-run"], "candidates"),
    "compare": ([*QUICK, "--clippings", "auto-s", "--seeds", "1"], "auto-s is the only private one"),
    "report": (["run"], "12 of 12"),
    "reproduce": (["--list"], "auto-fashion"),
}

# Wrong uses, and what each prints on stderr.
WRONG: dict[str, list[tuple[list[str], str]]] = {
    "train": [
        (["--epsilonn", "3"], "No such option: --epsilonn. Did you mean --epsilon? See:  clipless train --help"),
        (["--epsilon", "three"], "Invalid value for '--epsilon'"),
        (["--data", "digit"], "unknown data set 'digit': did you mean 'digits'?"),
        (["--model", "liner"], "unknown model 'liner': did you mean 'linear'?"),
        (["--clipping", "atuo-s"], "unknown clipping 'atuo-s': did you mean 'auto-s'?"),
        (["--clipping", "auto"], "unknown clipping 'auto': did you mean 'auto-s'?"),
        (["--clipping", "dc-p(percentil=0.3)"], "unknown parameter of dc-p 'percentil': did you mean 'percentile'?"),
        (["--optimizer", "adm"], "unknown optimizer 'adm': did you mean 'adam'?"),
        (["--accountant", "plt"], "unknown accountant 'plt': did you mean 'pld'?"),
        (["--data", "table.csv"], "which of the 3 columns of table.csv is to be predicted?"),
        (["--data", "table.csv", "--target", "pay"], "did you mean column 3?"),
        (["--config", "none.toml"], "cannot read the configuration none.toml"),
        (["--config", "."], "cannot read the configuration ."),
        (["--epsilon", "-1"], "epsilon must be finite and above 0"),
        (["--epsilon", "nan"], "epsilon must be a number and is NaN"),
        (["--epochs", "0"], "epochs is 0: choose at least one"),
        (["--batch-size", "99999"], "choose one from 1 to the 1437 training records"),
        (["--data", "empty.csv", "--target", "y"], "empty.csv is empty"),
        (["--data", "dup.csv", "--target", "b"], "columns 2 and 3 of dup.csv have the same name"),
        (["--data", "pickled.npz"], "(it holds Python objects). Write it with numpy.savez."),
        (["--tensorboard", "empty.csv"], "cannot write to empty.csv"),
        (["--out", "empty.csv"], "cannot write to empty.csv"),
        (["--loss", "os:getcwd"], "the loss 'os:getcwd' failed on made-up records"),
        (["--model", "mine:scalar", "--data", "mine:numbers"], "its output has shape (6,) for 6 records"),
    ],
    "schema": [(["none.csv"], "none.csv cannot be read"), (["table.csv", "--target", "pay"], "did you mean column 3?")],
    "budget": [(["--epsilon", "1"], "Give --dataset-size and --batch-size, or --sample-rate.")],
    "check": [(["--model", "cnnn"], "unknown model 'cnnn': did you mean 'cnn'?"), ([], "Missing option '--model'")],
    "audit": [
        (["--clipping", "dc-p(percentil=0.3)"], "did you mean 'percentile'?"),
        (["--clipping", "schedule(0.5 abadi, 0.5 auto-s)"], "audit one phase at a time"),
        (["--games", "stepp"], "unknown game 'stepp': did you mean 'step'?"),
    ],
    "bench": [(["--models", "tabulr"], "did you mean 'tabular'?")],
    "tune": [
        ([], "there is nothing to try: give --try lr=0.05,0.1"),
        (["--try", "learning=1"], "unknown setting 'learning'"),
        (["--try", "epochs=0,1", "--dry-run"], "epochs is 0: choose at least one"),
        (["--try", "lr=nan,1", "--dry-run"], "lr is nan: choose a positive number"),
        (["--try", "clipping.percentil=0.1", "--clipping", "dc-p"], "did you mean 'percentile'?"),
    ],
    "compare": [(["--clippings", "auto-s,abaadi"], "unknown clipping 'abaadi': did you mean 'abadi'?")],
    "report": [([], "Missing argument 'RUN'"), (["nowhere"], "cannot read"), (["."], "there is no run in .")],
    "reproduce": [(["auto-fashon"], "did you mean 'auto-fashion'?"), ([], "nothing to reproduce: give one of")],
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    arguments = ["train", *QUICK, "--epochs", "2", "--json", "--out", str(folder)]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    return folder


@pytest.fixture
def folder(tmp_path: Path, run_folder: Path) -> Path:
    (tmp_path / "table.csv").write_text(TABLE)
    (tmp_path / "empty.csv").touch()
    (tmp_path / "dup.csv").write_text("a,b,b\n1,2,3\n")
    (tmp_path / "pickled.npz").write_bytes(b"\x80\x04N.")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "run").symlink_to(run_folder)
    return tmp_path


def shown(done: Done) -> str:
    return " ".join((done.stdout + done.stderr).split())


def test_every_command_is_here() -> None:
    assert set(RIGHT) == set(WRONG) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_the_options_of_all_commands(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_main([command, "--help"], tmp_path, capsys)
    assert done.returncode == 0
    assert f"Example: {COMMANDS[command].example}" in shown(done)
    assert COMMANDS[command].example.startswith(f"clipless {command} ")
    for option in ("--json", "--quiet", "--debug"):
        assert option in done.stdout
        assert not re.search(rf"{option}[^\n]*<bool>", done.stdout)
    if command in ("train", "compare", "tune", "audit"):
        assert "[columns.NAME]" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_right_use(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected = RIGHT[command]
    done = run_main([command, *arguments, "--quiet"], folder, capsys)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_all_of_stdout(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main([command, *RIGHT[command][0], "--json"], folder, capsys)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [(command, *case) for command, cases in WRONG.items() for case in cases],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_a_wrong_use_is_two_lines_with_the_remedy(
    command: str, arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_main([command, *arguments], folder, capsys)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert "Traceback" not in done.stderr


def test_without_a_command_the_help_is_shown_and_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main([], tmp_path, capsys)
    assert (done.returncode, done.stderr) == (2, "")
    assert "Usage: clipless" in done.stdout


def test_a_finished_run_that_is_resumed_says_so_in_json_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main(["train", "--resume", "--out", "run", "--json"], folder, capsys)
    assert done.returncode == 0
    record = json.loads(done.stdout)
    assert record["metrics"]["steps"] == 12
    assert record["notes"] == [done.stderr.strip()] == ["The run in run is finished: run/run.json."]


def test_a_run_is_found_by_its_record_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_folder, by_record = (run_main(["report", name, "--json"], folder, capsys) for name in ("run", "run/run.json"))
    assert by_folder.stdout == by_record.stdout


def test_a_full_disk_is_said_to_be_full(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output, "show_table", full)
    done = run_main(["report", "run"], folder, capsys)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: the disk is full ([Errno 28]")
    assert len(done.stderr.splitlines()) == 1


def test_a_wrong_command_gets_the_nearest_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main(["trian"], tmp_path, capsys)
    assert done.returncode == 2
    assert done.stderr == "Error: No such command 'trian'. Did you mean 'train'? See:  clipless --help\n"


def test_debug_shows_where_an_error_was_raised(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main(["train", "--data", "digit", "--debug"], folder, capsys)
    assert done.returncode == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: unknown data set 'digit'")


def test_an_error_in_the_users_code_says_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_net.py").write_text("def build(shape, classes):\n    raise KeyError('width')\n")
    done = run_main(["train", "--model", "my_net:build"], folder, capsys)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: KeyError in my_net.py, line 2.\n")
    assert len(done.stderr.splitlines()) == 2
    assert "KeyError: 'width'" in run_main(["train", "--model", "my_net:build", "--debug"], folder, capsys).stderr


def test_an_error_of_the_system_is_shown_with_its_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_net.py").write_text("def build(shape, classes):\n    return open('no-such-file')\n")
    done = run_main(["train", "--model", "my_net:build"], folder, capsys)
    assert "FileNotFoundError in my_net.py, line 2: [Errno 2] No such file or directory: 'no-such-file'" in done.stderr


def test_exit_codes_are_in_the_help_of_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    help_text = shown(run_main(["--help"], tmp_path, capsys)).replace("│ │ ", "")
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in help_text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("clipless tr", {"train"}),
        ("clipless train --eps", {"--epsilon"}),
        ("clipless train --clipping dc", {"dc-p", "dc-e"}),
        ("clipless report --ht", {"--html"}),
    ],
)
def test_the_shell_completes_commands_options_and_names(words: str, expected: set[str]) -> None:
    environment = {
        "_CLIPLESS_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    found = CliRunner().invoke(app, [], prog_name="clipless", env={**os.environ, **environment})
    assert set(re.split(r"\s+", found.stdout.strip())) == expected
