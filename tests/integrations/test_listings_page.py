"""docs/listings.md: both sides of every pair run and add up the same, and are not what another rule would add up."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import clipless

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
PAGE = (Path(__file__).parents[2] / "docs" / "listings.md").read_text(encoding="utf-8")
BEGINNING, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


PAIRS = {section.partition("\n")[0]: blocks(section) for section in SECTIONS}


def sums(code: str) -> list[torch.Tensor]:
    names: dict[str, Any] = {"__name__": "listings"}
    for block in (*blocks(BEGINNING), code):
        exec(compile(block, "docs/listings.md", "exec"), names)
    return list(names["sums"])


def test_every_listing_has_both_sides() -> None:
    assert [title.partition(":")[0] for title in PAIRS] == ["K.1", "K.1", "K.2", "K.3"]
    assert all(len(pair) == 2 and pair[1].startswith("# clipless") for pair in PAIRS.values())


@pytest.mark.parametrize("title", PAIRS)
def test_both_sides_of_a_listing_add_up_the_same(title: str) -> None:
    theirs, ours = map(sums, PAIRS[title])
    assert len(theirs) == len(ours) == 4
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_listings_are_told_from_abadis_rule() -> None:
    names: dict[str, Any] = {}
    exec(blocks(BEGINNING)[0], names)
    batch = names["x"], names["y"]
    abadi = clipless.clipped_sum(names["build_model"](), names["losses"], batch, clipping=clipless.abadi()).grads
    for pair in PAIRS.values():
        assert not torch.allclose(sums(pair[1])[0], abadi["0.weight"], rtol=1e-2)
