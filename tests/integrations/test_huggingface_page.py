"""The Python of docs/huggingface.md runs as it stands there, from top to bottom."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_the_page_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"huggingface.md block {number}", "exec"), names)
    assert len(BLOCKS) == 4
    assert capsys.readouterr().out.count("epsilon=") == 4
