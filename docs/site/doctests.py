"""Doctests in docstrings become blocks of code on the site, and paths of pages become links."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> (?:.*\n?)+?(?=\n\n(?!>>>)|\Z)", flags=re.MULTILINE)
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
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```", linked)
