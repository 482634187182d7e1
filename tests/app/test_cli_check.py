"""`clipless check`: the report, the exit codes, and what is a bad argument rather than an unsound model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import clipless
from clipless.app.cli import app
from commanding import run_main

ENVIRONMENT = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
FACTORIES = """
from torch import nn

def plain(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

def normalised(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))

def misfit(shape, classes):
    return nn.Linear(7, classes)

def too_few(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FACTORIES)
    return tmp_path


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clipless.app.cli", "check", *arguments]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def test_a_sound_model_exits_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main(["check", "--model", "mine:plain", "--data", "digits", "--clipping", "abadi"], folder, capsys)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1.weight   10x64  linear" in done.stdout
    assert "oracle agreement   holds" in done.stdout
    assert done.stdout.endswith("sound\n")


def test_an_unsound_model_exits_1_with_the_remedy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main(["check", "--model", "mine:normalised"], folder, capsys)
    assert (done.returncode, done.stderr) == (1, "")
    assert "BatchNorm1d '2' mixes records" in done.stdout
    assert "clipless.replace_batchnorm(model)" in done.stdout


def test_no_record_is_looked_at(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of the report are not noised: they are those of made-up records."""
    (folder / "guarded.py").write_text(
        "from dataclasses import replace\nfrom torch.utils.data import TensorDataset\n"
        "from clipless.app.data import load as named\n"
        "class Guarded(TensorDataset):\n    def __getitem__(self, index): raise AssertionError('a record was taken')\n"
        "def load():\n    data = named('digits')\n    return replace(data, train=Guarded(*data.train.tensors))\n"
    )
    done = run_main(["check", "--model", "linear", "--data", "guarded:load"], folder, capsys)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("sound\n")


def test_json_is_all_of_stdout(folder: Path) -> None:
    done = check(folder, "--model", "mine:normalised", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    record = json.loads(done.stdout)
    assert (record["sound"], record["model"], record["data"]) == (False, "mine:normalised", "digits")
    assert record["oracle_error"] is None
    assert record["parameters"][0] == {"parameter": "1.weight", "shape": [8, 64], "how": "linear"}


def test_a_model_that_does_not_fit_the_data_exits_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main(["check", "--model", "mine:misfit"], folder, capsys)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: the model 'mine:misfit' cannot be trained on digits")
    assert "records of shape (1, 8, 8) to 10 logits" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "cn"], "did you mean 'cnn'"),
        (["--model", "mine:nothing"], "cannot import the model"),
        (["--model", "mine:too_few"], "to 10 logits"),
        (["--model", "linear", "--data", "digit"], "did you mean 'digits'"),
        (["--model", "linear", "--clipping", "none"], "unknown clipping 'none'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(clipless.CliplessError, match=message):
        CliRunner().invoke(app, ["check", *arguments], catch_exceptions=False)


def test_the_model_is_asked_for() -> None:
    assert CliRunner().invoke(app, ["check"]).exit_code == 2


@pytest.mark.parametrize("model", ["linear", "mlp", "cnn"])
def test_the_models_of_the_command_line_are_sound(model: str) -> None:
    result = CliRunner().invoke(app, ["check", "--model", model, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["sound"] is True
