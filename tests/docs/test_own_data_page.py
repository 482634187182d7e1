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


def run_command(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words[0] in COMMANDS
    output = folder / words[-1] if words[-2] == ">" else None
    done = run_main(words[:-2] if output else words, folder, capsys)
    assert done.returncode == 0, (words, done.stderr)
    if output:
        output.write_text(done.stdout)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    named = {id(block): re.match(r"# ([\w.]+)", block) for _, block in BLOCKS}
    for _, block in BLOCKS:
        if name := named[id(block)]:
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
    shown, ran = "", 0
    for kind, block in BLOCKS:
        if kind == "python" and not named[id(block)]:
            exec(compile(block, "docs/own_data.md", "exec"), {})
            shown += capsys.readouterr().out
        for words in commands(block) if kind == "sh" else []:
            run_command(words, tmp_path, capsys)
            ran += 1
    assert ran == 14
    assert re.fullmatch(r"\['(yes|no)'(, '(yes|no)'){4}\]\n", shown)
    assert (tmp_path / "runs" / "board").is_dir()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", PAGE))))
def test_link_leads_to_a_file(target: str) -> None:
    assert (ROOT / "docs" / target).is_file()
