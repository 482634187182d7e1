"""Doctests in docstrings become blocks of code on the site, and paths of pages become links."""

import re
from typing import Any

import griffe

PAGE = re.compile(r"\bdocs/(\w+)\.md\b")


class Doctests(griffe.Extension):
    """Applied to everything that has a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with every doctest in a fence, and links to pages.

    >>> fenced("Doubles.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['Doubles.', '', '```pycon', '>>> 1 + 1', '2', '```']
    >>> fenced("See docs/noise.md.")
    'See [docs/noise.md](noise.md).'
    """
    linked = PAGE.sub(r"[docs/\1.md](\1.md)", text)
    parts = linked.split("\n\n")
    return "\n\n".join(f"```pycon\n{part.rstrip()}\n```" if part.startswith(">>>") else part for part in parts)
