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


def test_the_gaussian_form_keeps_its_level_and_is_close() -> None:
    """Of 1000 true claims 50 are refuted at most; 73 or more have a chance of 0.1 %. The middle bound is above half of the
    claim unless most canaries are never drawn: at rate 0.001 and 200 steps it is 48 %."""
    assert len(STORED["gauss"]) >= 5
    for row in STORED["gauss"]:
        assert row["runs"] == 1000
        assert row["refuted"] / row["runs"] < 0.073
        often = row["rate"] * row["steps"] > 0.5
        assert row["lower_bound"] > (0.5 if often else 0.4) * row["claimed_epsilon"]


def test_every_inmate_of_the_zoo_was_caught() -> None:
    assert all(row["caught"] for row in STORED["zoo"])
    assert len(STORED["zoo"]) >= 14


def test_mnist_was_audited_at_3_and_8() -> None:
    """The bound by the Gaussian form is as high as in 999 of 1000 trainings that keep the claim."""
    claims = {row["arguments"]["epsilon"]: row for row in reversed(STORED["mnist"])}
    assert claims.keys() == {3.0, 8.0}
    assert all(row["lower_bound"] <= row["claimed_epsilon"] for row in STORED["mnist"])
    crafted = {claim: row for claim, row in claims.items() if row["audit"]["kind"] == "crafted"}
    least = {row["epsilon"]: row["least"] for row in STORED["spread"]}
    assert crafted.keys() == least.keys() == {3.0, 8.0}
    for claim, row in crafted.items():
        assert row["lower_bound"] > least[claim] * row["claimed_epsilon"]
        assert row["games"][0]["gauss"] == row["lower_bound"]
