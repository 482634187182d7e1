"""The house rules, read off the source: who may import whom, and what no file may do."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "clipless"
FILES = sorted(SOURCE.rglob("*.py"))
MEETING_PLACES = {"__init__", "private", "plan", "training", "keeping", "preflight", "oracle", "cli", "grads", "tuning"}
FOUNDATIONS = {"errors", "durable", "compiled", "partition", "noise", "thresholds", "clipping"}


def room(path: Path) -> str:
    """The top-level module or package a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def siblings(path: Path) -> set[str]:
    parts = {name.split(".")[1] for name in imports(path) if name.startswith("clipless.")}
    return parts - {room(path), "errors"}


@pytest.mark.parametrize("path", [p for p in FILES if room(p) in {"accounting", "theory"}], ids=lambda p: p.stem)
def test_accounting_imports_no_torch(path: Path) -> None:
    assert not [name for name in imports(path) if name.split(".")[0] == "torch"]


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(p) in {"clipping", "thresholds", "partition"}], ids=lambda p: p.stem
)
def test_the_maths_of_clipping_imports_no_modules(path: Path) -> None:
    assert not [name for name in imports(path) if name.startswith("torch.nn")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_only_the_meeting_places_import_several_siblings(path: Path) -> None:
    if room(path) not in MEETING_PLACES:
        assert len(siblings(path) - FOUNDATIONS) <= 1
    if room(path) != "cli":
        assert "cli" not in siblings(path)
    assert "experiments" not in siblings(path)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_only_grads_registers_module_hooks(path: Path) -> None:
    calls = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    hooks = {name for name in calls if (name.startswith("register_") and "forward" in name) or name == "register_hook"}
    assert not hooks or room(path) == "grads"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_nothing_is_printed_outside_the_command_line(path: Path) -> None:
    calls = {
        n.func.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and hasattr(n.func, "id")
    }
    assert "print" not in calls or room(path) == "cli"
    assert "setattr" not in calls


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 360
