"""The code of docs/own_data.md runs as it stands there: files are written, Python is run, commands succeed."""

import re
from pathlib import Path

import pytest

from clipless.app.cli import COMMANDS
from commanding import run_main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own_data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[list[str]]:
    return [line.split()[1:] for line in block.splitlines() if line]


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, block in BLOCKS:
        named = re.match(r"# ([\w.]+)", block)
        if named:
            (tmp_path / named[1]).write_text(block, encoding="utf-8")
        elif kind == "python":
            exec(compile(block, "docs/own_data.md", "exec"), {})
    ran = [words for kind, block in BLOCKS if kind == "sh" for words in commands(block)]
    for words in ran:
        assert words[0] in COMMANDS
        output = tmp_path / words[-1] if words[-2] == ">" else None
        done = run_main(words[:-2] if output else words, tmp_path, capsys)
        assert done.returncode == 0, (words, done.stderr)
        if output:
            output.write_text(done.stdout)
    assert len(ran) == 14
    assert (tmp_path / "runs" / "board").is_dir()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", PAGE))))
def test_link_leads_to_a_file(target: str) -> None:
    assert (ROOT / "docs" / target).is_file()
