"""Every target of the Makefile: its commands parse, the files it names exist, and its scripts run in a cheap form."""

import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import children

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.search(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)[1].split()  # type: ignore[index]

# What each target runs, with the options that make it cheap, in a copy of docs; and a file it has to write there.
QUICK: dict[str, list[tuple[list[str], str]]] = {
    "demo": [(["examples/demo.py", "--quick"], "")],
    "figures": [
        (["experiments/clipping.py", "--quick", "--docs", "docs"], "docs/figures/dc-e.svg"),
        (["experiments/budget.py", "--quick", "--docs", "docs"], "docs/figures/budget.json"),
        (["experiments/concepts.py", "--docs", "docs"], "docs/figures/guesses.svg"),
    ],
    "screenshots": [(["experiments/screenshots.py", "--quick", "--docs", "docs"], "docs/screenshots/train.svg")],
    "test-worlds": [(["tests/distributed/all_worlds.py", "1", "--quick"], "")],
    "sweep": [(["tests/accounting/sweep.py", "--every", "2000", "--accountants", "gdp"], "")],
    "soak": [(["benchmarks/soak.py", "--steps", "60", "--most-growth", "1e6"], "")],
    "audit": [(["experiments/audit.py", "--quick", "--docs", "docs"], "docs/audit.md")],
    "zoo": [
        (["experiments/judge_zoo.py", "OPTForCausalLM"], ""),
        (["experiments/models_page.py", "docs/models.md"], "docs/models.md"),
    ],
    "models-page": [(["experiments/models_page.py", "docs/models.md"], "docs/models.md")],
}
# `make bench` is run by tests/app/test_bench.py with --quick, one of `make sabotage` by tests/test_sabotages.py; the rest
# runs these tests, runs beside them because it needs other packages, or tidies up.
ELSEWHERE = {
    "bench",
    "docs",
    "package-check",
    "sabotage",
    "test",
    "test-integrations",
    "test-scripts",
    "test-torch",
    "lint",
    "format",
    "help",
    "clean",
}
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def test_every_target_is_run_by_a_test_or_by_what_runs_the_tests() -> None:
    assert set(TARGETS) == set(QUICK) | ELSEWHERE
    assert set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE)) == set(TARGETS)


@needs_make
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_parses_and_names_files_that_exist(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    scripts = re.findall(r"\S+/python (\S+\.py)", done.stdout)
    assert target == "sabotage" or sorted(scripts) == sorted(command[0] for command, _ in QUICK.get(target, []))
    assert all((ROOT / script).is_file() for script in scripts)


@needs_make
def test_another_version_of_torch_gets_an_environment_of_its_own_and_the_core_tests() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "test-torch", "VERSION=2.99"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip install --quiet --disable-pip-version-check torch==2.99" in done.stdout
    assert "grep -v -E '^(torch|sympy|" in done.stdout, "the pinned torch, and what it asks for, must not replace it"
    last = done.stdout.strip().splitlines()[-1].split()
    assert last[0] == ".venv-torch-2.99/bin/python"
    named = [word for word in last if word.startswith("tests/")]
    assert len(named) > 5
    assert all((ROOT / name).exists() for name in named)


@needs_make
def test_every_script_that_make_test_leaves_out_is_run_by_test_scripts() -> None:
    done = subprocess.run(["make", "--dry-run", "test-scripts"], cwd=ROOT, capture_output=True, text=True, check=True)
    run = [ROOT / name for name in done.stdout.split() if name.startswith("tests/")]
    marked = [
        path for path in (ROOT / "tests").rglob("test_*.py") if "mark.scripts\n" in path.read_text(encoding="utf-8")
    ]
    assert len(marked) >= 4
    assert all(any(path.is_relative_to(folder) for folder in run) for path in marked)
    assert "make test-scripts" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


# These run here: their children come from the server that is there, or what they import is here already.
HERE = {
    "examples/demo.py",
    "experiments/judge_zoo.py",
    "tests/accounting/sweep.py",
    "tests/distributed/all_worlds.py",
}
ONCE = {tuple(command): written for runs in QUICK.values() for command, written in runs}


def forked(command: Sequence[str], **_: Any) -> children.Done:
    """`subprocess.run` of a Python program, which is forked from the server."""
    _, *program = command
    return children.run(*(program[1:] if program[0] == "-m" else program))


def exit_code(script: Path) -> int | str:
    """What the script ends with if it is run here."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        return ended.code or 0
    return 0


@pytest.mark.scripts
@pytest.mark.parametrize(("command", "written"), ONCE.items(), ids=[script for script, *_ in ONCE])
def test_a_script_runs(command: tuple[str, ...], written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if written:
        shutil.copytree(ROOT / "docs", tmp_path / "docs")
        (tmp_path / written).unlink()
    name, *options = command
    script = ROOT / name
    if name in HERE:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(script), *options])
        monkeypatch.setattr(subprocess, "run", forked)
        monkeypatch.syspath_prepend(script.parent)
        assert exit_code(script) == 0
    else:
        done = children.run(script, *options, cwd=tmp_path, strict=True)
        assert done.returncode == 0, done.stderr
    assert not written or (tmp_path / written).stat().st_size > 100


def test_the_pages_have_a_place_for_their_tables() -> None:
    """The markers between which the scripts write are there, once each."""
    for name in ("clipping.md", "budget.md"):
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert page.count("<!-- table -->") == page.count("<!-- end of table -->") == 1
