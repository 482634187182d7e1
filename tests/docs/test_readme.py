"""The README's Python runs as it stands there, and the files it points to exist."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_readme_has_the_loop() -> None:
    assert any("clipless.make_private(" in block and "private.step(record_losses, batch)" in block for block in BLOCKS)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_block_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(BLOCKS[number], f"README.md block {number}", "exec"), names)
    assert "epsilon=" in capsys.readouterr().out


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_link_leads_to_a_file(target: str) -> None:
    assert (ROOT / target).is_file()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_targets_of_the_readme_exist(target: str) -> None:
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_the_way_to_the_first_model_is_the_one_that_was_measured() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "first_model.py"))
    stored = json.loads((ROOT / "benchmarks" / "results" / "first_model.json").read_text(encoding="utf-8"))
    assert f"{script['START']}\n{script['sentence'](stored)}\n{script['END']}" in README
    assert stored["epsilon"] <= 3


def test_the_places_of_generated_tables_are_there() -> None:
    for name in ("speed", "results", "first model"):
        assert README.count(f"<!-- {name} -->") == README.count(f"<!-- end of {name} -->") == 1


def test_a_stranger_reads_it_in_two_minutes() -> None:
    """At 250 words a minute, without code and tables."""
    prose = re.sub(r"^```.*?^```$|^\|.*$|<!-- .*? -->", "", README, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) < 600
