"""The pages of the documentation and the README: their blocks of code, links and headings."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.name: path for path in [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]}


class Block(NamedTuple):
    kind: str
    text: str


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page, in order. Raises if a fence is not closed."""
    text = path.read_text(encoding="utf-8")
    found = [Block(*parts) for parts in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)]
    assert 2 * len(found) == len(re.findall(r"^```", text, flags=re.MULTILINE)), path
    return found


def prose(path: Path) -> str:
    """A page without its blocks, inline code and comments."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`|<!--.*?-->", "", text)


def links(path: Path) -> list[str]:
    """The targets of all links and pictures."""
    return re.findall(r"\]\(\s*([^)\s]+)\s*\)", prose(path))


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as the site makes them, and of what it shows of the interface."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    shown = re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)
    return {*shown, *(slug(title) for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE))}


def slug(title: str) -> str:
    """The anchor of a heading.

    >>> slug("How it is computed, and where it is `loose`")
    'how-it-is-computed-and-where-it-is-loose'
    """
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
