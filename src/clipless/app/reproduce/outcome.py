"""What a reproduction hands back, and how it reports where it is."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# What is being done, how many parts are done, of how many.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Outcome:
    """The page to open, and for each figure its file and its sentence."""

    page: Path
    figures: dict[str, str]
