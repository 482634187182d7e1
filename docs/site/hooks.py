"""Hooks of the documentation site: pages that a command has not written yet are left out of its navigation, and no page may
load anything from a network."""

import re
from pathlib import Path
from typing import Any

LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


def on_config(config: Any) -> Any:
    """The configuration, with only those pages in the navigation that exist."""
    config.nav = existing(config.nav, Path(config.docs_dir))
    return config


def existing(entry: Any, folder: Path) -> Any:
    """A part of the navigation without pages that are not in the folder; None if nothing is left of it.

    >>> existing([{"Here": "hooks.py"}, {"There": "missing.md"}, {"All": [{"x": "missing.md"}]}], Path(__file__).parent)
    [{'Here': 'hooks.py'}]
    """
    if isinstance(entry, str):
        return entry if (folder / entry).is_file() else None
    if isinstance(entry, dict):
        kept = {title: left for title, inside in entry.items() if (left := existing(inside, folder))}
    else:
        kept = [left for inside in entry if (left := existing(inside, folder))]
    return kept or None


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The page as it is. Raises if a reader's browser would ask another machine for a part of it."""
    found = LOADED.findall(output)
    if found:
        raise RuntimeError(f"{page.file.src_uri} would load from a network: {', '.join(found)}")
    return output
