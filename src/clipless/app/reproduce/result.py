"""What a reproduction returns."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReproductionResult:
    """The page to open, and for each figure its file and its sentence."""

    page: Path
    figures: dict[str, str]
