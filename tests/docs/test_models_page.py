"""docs/models.md says what the registry, the refusals and the engine say today."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from clipless.gradients.capture.refusals import REFUSALS
from clipless.gradients.layers.rule import NAMED, REGISTRY

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "experiments" / "models_page.py"))


def test_page_is_current(script: dict[str, Any]) -> None:
    assert script["page"]() == PAGE, "docs/models.md is out of date: run `make models-page`."


def test_page_names_every_layer_and_every_refusal() -> None:
    for kind in REGISTRY:
        assert f"`{kind.__name__}`" in PAGE
    for name in NAMED:
        assert f"`{name}`" in PAGE
    for refusal in REFUSALS:
        assert f"| {refusal.what} | It {refusal.why}. | {refusal.remedy}. |" in PAGE


def test_no_rule_is_without_a_note(script: dict[str, Any]) -> None:
    assert all(all(row) for row in script["exact"]())
