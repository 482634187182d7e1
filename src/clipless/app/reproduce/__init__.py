"""`clipless reproduce`: what the papers show, made again. `REPRODUCTIONS` finds each by its id.

To add one, write a function `(folder, kind of pictures, on_progress) -> ReproductionResult` and register it here with a
line on what it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clipless.app.progress import OnProgress
from clipless.app.reproduce.result import ReproductionResult


@dataclass(frozen=True)
class Reproduction:
    """Something that can be reproduced: what it is, and how, into a folder."""

    what: str
    run: Callable[[Path, str, OnProgress], ReproductionResult]


def _theory(folder: Path, kind: str, report: OnProgress) -> ReproductionResult:
    from clipless.app.reproduce import theory
    from clipless.app.reproduce.page import draw_page

    return draw_page(theory.TITLE, theory.DRAWINGS, folder, kind, report)


REPRODUCTIONS = {
    "theory": Reproduction(
        "the papers' bounds, regions, kernels and flows as figures; no data, under a minute", _theory
    ),
}
