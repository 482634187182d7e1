"""The code of docs/lightning.md, and the example, run as they stand."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from lightning_runs import QUIET

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lightning.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)

pytestmark = [
    *[pytest.mark.filterwarnings(text) for text in QUIET],
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended.*"),
]


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"docs/lightning.md block {number}", "exec"), names)
    spent = re.findall(r"Spent\(epsilon=(2\.\d+|3\.0\d*), delta=1e-05, steps=(\d+)", capsys.readouterr().out)
    assert [int(steps) for _, steps in spent] == [16, 16]


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning_module.py", "--epochs", "1", "--records", "320"])
    runpy.run_path(str(ROOT / "examples" / "lightning_module.py"), run_name="__main__")
    assert re.search(r"accuracy 0\.\d+, Spent\(epsilon=(2\.\d+|3\.0)", capsys.readouterr().out)
