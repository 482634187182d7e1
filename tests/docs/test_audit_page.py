"""docs/audit.md is what its command writes from the stored results, and these show what the page says."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from clipless.clipping import CLIPPINGS

ROOT = Path(__file__).parents[2]
STORED = json.loads((ROOT / "docs" / "figures" / "audit.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit_page", ROOT / "experiments" / "audit_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_current(script: ModuleType) -> None:
    page = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    assert script.page(STORED) == page, "docs/audit.md is out of date: run `python experiments/audit.py --only page`."


def test_every_clipping_keeps_its_claim_and_is_bounded_tightly() -> None:
    assert {row["clipping"] for row in STORED["steps"]} == set(CLIPPINGS)
    for row in STORED["steps"]:
        assert row["sound"]
        assert 0.85 * row["claimed_epsilon"] <= row["lower_bound"] <= row["claimed_epsilon"]


def test_every_inmate_of_the_zoo_was_caught() -> None:
    assert all(row["caught"] for row in STORED["zoo"])
    assert len(STORED["zoo"]) >= 14


def test_mnist_was_audited_at_3_and_8() -> None:
    claims = {row["arguments"]["epsilon"]: row for row in STORED["mnist"]}
    assert claims.keys() == {3.0, 8.0}
    assert all(row["lower_bound"] <= row["claimed_epsilon"] for row in STORED["mnist"])
    assert all(row["lower_bound"] > 1 for row in STORED["mnist"] if row["audit"]["kind"] == "crafted")
