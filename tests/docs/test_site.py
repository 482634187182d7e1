"""The hooks of the documentation site: pages that do not exist yet are left out, and nothing is loaded from a network."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "site"
HOOKS = runpy.run_path(str(FOLDER / "hooks.py"))


def test_pages_that_do_not_exist_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "here.md").write_text("# Here")
    nav = [
        {"Here": "here.md"},
        {"Later": "later.md"},
        {"Part": [{"Again": "here.md"}, {"x": "y.md"}]},
        {"Empty": [{"z": "z.md"}]},
    ]
    config = HOOKS["on_config"](SimpleNamespace(nav=nav, docs_dir=str(tmp_path)))
    assert config.nav == [{"Here": "here.md"}, {"Part": [{"Again": "here.md"}]}]


@pytest.mark.parametrize(
    "part",
    [
        '<script src="https://example.org/x.js"></script>',
        "<link rel=stylesheet href=//example.org/x.css>",
        '<img alt="x" src="http://example.org/x.png">',
    ],
)
def test_a_page_that_would_load_from_a_network_is_refused(part: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    with pytest.raises(RuntimeError, match="page.md would load from a network"):
        HOOKS["on_post_page"](f"<html>{part}</html>", page)


def test_links_that_a_reader_may_follow_are_fine() -> None:
    text = '<a href="https://example.org">x</a><img src="figures/x.svg"><script src="assets/x.js"></script>'
    assert HOOKS["on_post_page"](text, None) == text


def test_doctests_become_blocks_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Object=object))  # for the site only
    fenced = runpy.run_path(str(FOLDER / "doctests.py"))["fenced"]
    assert fenced("Doubles.\n\n>>> 1 + 1\n2\n\nMore.") == "Doubles.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."
    assert fenced("See docs/noise.md.") == "See [docs/noise.md](noise.md)."
