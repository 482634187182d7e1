"""The price of choosing among training runs: three methods, one registry, and the ledger entry of a choice."""

from clipless.accounting.selection.event import SelectionEvent
from clipless.accounting.selection.grid_search import GridSearch
from clipless.accounting.selection.liu_talwar import LiuTalwar
from clipless.accounting.selection.method import Run, SelectionMethod
from clipless.accounting.selection.papernot_steinke import PapernotSteinke
from clipless.accounting.selection.pricing import (
    AUTO,
    METHODS,
    RunShape,
    SingleRun,
    cheapest,
    method_named,
    price,
    prices,
    single_run,
    total,
)
from clipless.accounting.selection.repetitions import Repetitions

__all__ = [
    "AUTO",
    "METHODS",
    "GridSearch",
    "LiuTalwar",
    "PapernotSteinke",
    "Repetitions",
    "Run",
    "RunShape",
    "SelectionEvent",
    "SelectionMethod",
    "SingleRun",
    "cheapest",
    "method_named",
    "price",
    "prices",
    "single_run",
    "total",
]
