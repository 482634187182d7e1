"""The Python of docs/jax.md runs as it stands there, one block after the other."""

import re
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import optax

PAGE = (Path(__file__).parents[2] / "docs" / "jax.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "jax_page"}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"docs/jax.md block {number}", "exec"), names)
    told = capsys.readouterr().out
    assert len(BLOCKS) == told.count("Spent(epsilon=2.") == 2


def test_the_page_names_the_versions_it_was_run_with() -> None:
    assert f"jax {jax.__version__} and optax {optax.__version__}" in PAGE
