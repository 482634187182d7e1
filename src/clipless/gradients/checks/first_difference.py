"""Where two runs of a function first differ: the line that calls the operation, for an error message."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode

from clipless.gradients.checks.seeds import rows_of, sketch
from clipless.gradients.records import TROUBLES
from clipless.torch_internals import pytree

# Rows that differ by more, relative, differ; less is rounding.
DIFFERS = 1e-4


class NotedCall(NamedTuple):
    """A call of a torch function: its name, the line that calls it, and a sketch of each tensor that it returned."""

    name: str
    line: str
    results: list[tuple[Tensor, bool]]


class CallNotes(TorchFunctionMode):
    """Notes every torch function that is called inside, on a batch of so many records."""

    def __init__(self, records: int) -> None:
        super().__init__()
        self.noted: list[NotedCall] = []
        self._records = records

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if leaves:
            self.noted.append(
                NotedCall(_name(func), _line(sys._getframe(1)), [self._sketched(leaf) for leaf in leaves])
            )
        return result

    def _sketched(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """A sketch, and whether its rows are the records."""
        shape, records = tuple(tensor.shape), self._records
        has_rows = records in shape
        return sketch(tensor.detach(), shape.index(records) if has_rows else 0), has_rows


def operations(run: Callable[[], object], records: int) -> list[NotedCall]:
    """What a run calls, up to its end or its error."""
    with CallNotes(records) as mode, contextlib.suppress(*TROUBLES):
        run()
    return mode.noted


def first_difference(one: list[NotedCall], other: list[NotedCall], kept: Tensor | None) -> str:
    """The first operation whose rows of the kept records differ, in words; empty if there is none. If that is None, all rows
    count, and tensors without rows as well."""
    for ours, theirs in zip(one, other, strict=False):
        if ours.name != theirs.name or len(ours.results) != len(theirs.results):
            return f" (first at {ours.line}, which is reached in one of both calls only)"
        for (a, has_rows), (b, _) in zip(ours.results, theirs.results, strict=True):
            if (has_rows or kept is None) and _differ(a, b, kept):
                return f" (first at {ours.line}: {ours.name})"
    return ""


def _differ(one: Tensor, other: Tensor, kept: Tensor | None) -> bool:
    if one.shape != other.shape:
        return True
    a, b = rows_of(one).double(), rows_of(other).double()
    if kept is not None:
        a, b = a[kept.to(a.device)], b[kept.to(b.device)]
    size = float(a.nan_to_num().abs().max()) if a.numel() else 0.0
    return bool(((a - b).nan_to_num().abs() > DIFFERS * size).any())


def short_path(path: str) -> str:
    """A file and its folder: enough to find it, and nothing of the machine.

    >>> short_path("projects/digits/model.py")
    'digits/model.py'
    """
    return "/".join(Path(path).parts[-2:])


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")


def _line(frame: FrameType | None) -> str:
    """The nearest caller outside of torch and clipless."""
    nearest = frame
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in ("torch", "clipless"):
            return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "" if nearest is None else f"{short_path(nearest.f_code.co_filename)}:{nearest.f_lineno}"
