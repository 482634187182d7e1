"""The examples run on tiny data, and the README shows what makes a plain script private."""

import difflib
import gzip
import re
import runpy
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import children

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, data: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--data-dir", str(data), *options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for part, count in (("train", 40), ("t10k", 10)):
        images, labels = random.integers(0, 256, (count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8) % 10
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    return tmp_path


@pytest.mark.parametrize("name", ["mnist.py", "mnist_private.py"])
def test_mnist(name: str, mnist: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(name, mnist, monkeypatch, "--batch-size", "10", "--epochs", "1")
    told = capsys.readouterr().out
    assert "Test set: Accuracy: " in told
    private = "private" in name
    assert ("Spent(epsilon=" in told and "steps=4" in told) is private
    assert ("Loss: " in told) is not private, "the training loss is not private"


def changes() -> list[str]:
    """The difference of the two scripts, without the names of the files."""
    plain, private = ((EXAMPLES / name).read_text().splitlines() for name in ("mnist.py", "mnist_private.py"))
    return list(difflib.unified_diff(plain, private, lineterm="", n=1))[2:]


def test_few_lines_make_mnist_private_and_the_readme_shows_them() -> None:
    found = changes()
    added = [line for line in found if line.startswith("+") and line != "+"]
    removed = [line for line in found if line.startswith("-") and line != "-"]
    assert len(added) == 12, "the import, the function and its call, make_private, what was spent"
    assert len(removed) == 10
    (shown,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert shown.splitlines() == found, "the README's diff is out of date: copy that of the two scripts."


def test_char_lstm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = [("Müller", "German"), ("Rossi", "Italian"), ("Li", "Chinese"), ("Bo", "Chinese")] * 12
    lines = ["name\tlanguage", *(f"{name}\t{language}" for name, language in names)]
    (tmp_path / "names.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run("char_lstm.py", tmp_path, monkeypatch, "--batch-size", "10", "--epochs", "1")
    told = capsys.readouterr().out
    assert re.search(r"epoch 1: [\d.]+% of 9 test names\nSpent\(epsilon=7\.\d+.*steps=4", told)


def test_tabular(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bounds = runpy.run_path(str(EXAMPLES / "tabular.py"))["BOUNDS"]
    random = np.random.default_rng(0)
    rows = [[*(random.uniform(low, high) for low, high in bounds.values()), random.integers(3, 9)] for _ in range(40)]
    text = [";".join(f'"{name}"' for name in (*bounds, "quality")), *(";".join(map(str, row)) for row in rows)]
    (tmp_path / "winequality-red.csv.gz").write_bytes(gzip.compress("\n".join(text).encode()))
    run("tabular.py", tmp_path, monkeypatch, "--batch-size", "8", "--epochs", "2")
    told = capsys.readouterr().out
    assert re.search(r"[\d.]+% of 8 test wines\nSpent\(epsilon=2\.\d+.*steps=8", told)


def test_torchrun(tmp_path: Path) -> None:
    """With the environment that torchrun gives; that it starts them so is seen in tests/integrations."""
    script, told = EXAMPLES / "torchrun.py", children.rank_environments(2)
    options: dict[str, Any] = {"cwd": tmp_path, "notes": tmp_path}
    ranks = [children.Child(script, "--epochs", "1", environment=environment, **options) for environment in told]
    first, second = (rank.done() for rank in ranks)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr[-2000:] + second.stderr[-2000:]
    assert re.search(r"[\d.]+% of 360 test digits\nSpent\(epsilon=[23]\.\d+.*steps=6", first.stdout)
    assert first.stdout.count("Spent(") == 1
    assert second.stdout == ""
