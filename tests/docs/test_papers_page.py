"""docs/papers.md: every cell is filled, and every experiment, test, function, figure and paper that it names exists."""

import importlib
import re
from pathlib import Path

import pytest

import clipless
from clipless.app.reproduce import theory
from clipless.app.reproduce.configuration import configurations

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
PREFIXES = {name.partition("-")[0] for name in configurations()} - {"unit"}


def test_no_cell_is_empty() -> None:
    assert len(ROWS) > 90
    assert [row for row in ROWS if not all(row)] == []


def test_every_experiment_that_is_named_exists_and_every_one_of_a_paper_is_named() -> None:
    named = set(re.findall(rf"\b(?:{'|'.join(PREFIXES)})-[a-z][a-z0-9]*(?:-[a-z]+)*\b", PAGE))
    drawings = {drawing.stem for drawing in theory.DRAWINGS}
    assert named - drawings <= set(configurations())
    assert {name for name in configurations() if not name.startswith("unit")} <= named


def test_figures_of_the_theory_exist() -> None:
    named = re.findall(r"\b(?:auto|dc)-\d\d\b", PAGE)
    stems = [drawing.stem for drawing in theory.DRAWINGS]
    assert len(named) > 8
    assert all(any(stem.startswith(name) for stem in stems) for name in named)


def test_every_figure_table_and_theorem_has_a_row() -> None:
    """The numbers that the papers print, by the first column of each paper's table."""
    wanted = {
        "AUTO": {"figure": range(1, 16), "table": range(1, 10), "theorem": range(1, 10), "algorithm": [1]},
        "DC": {"figure": range(1, 12), "theorem": range(1, 5), "algorithm": range(1, 5)},
        "GLOBAL": {"theorem": range(1, 5), "algorithm": range(1, 6)},
    }
    for paper, kinds in wanted.items():
        section = PAGE.split(f"\n## {paper}\n")[1].split("\n## ")[0]
        firsts = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
        for kind, numbers in kinds.items():
            found: set[int] = set()
            for listed in re.findall(rf"\b{kind}s? ((?:\d+(?:, | to | and )?)+)", "\n".join(firsts)):
                for first, last in re.findall(r"(\d+)(?: to (\d+))?", listed):
                    found |= set(range(int(first), int(last or first) + 1))
            assert set(numbers) <= found, (paper, kind, set(numbers) - found)


def test_tests_and_functions_that_are_named_exist() -> None:
    files = {path.name for path in (ROOT / "tests").rglob("*.py")}
    tests = re.findall(r"\b(test_\w+\.py)\b", PAGE)
    assert len(tests) > 30
    assert set(tests) <= files
    for module, name in re.findall(r"`(auto_bounds|auto_laws|dc|facts|flows|lazy_regions|ntk)\.(\w+)`", PAGE):
        assert hasattr(importlib.import_module(f"clipless.theory.{module}"), name), name
    for name in re.findall(r"`clipless\.(\w+)`", PAGE):
        assert hasattr(clipless, name), name


@pytest.mark.parametrize("number", sorted(set(re.findall(r"arXiv:(\d{4}\.\d{4,5})", PAGE))))
def test_a_paper_is_linked_by_the_number_that_it_shows(number: str) -> None:
    assert f"[arXiv:{number}](https://arxiv.org/abs/{number})" in PAGE
