"""The report of `clipless.check`: figures and verdicts as data, as a table, and as JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clipless.errors import Unsound

TOLERANCE = 1e-3
HALF_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Handling:
    """How one parameter's per-sample gradient is obtained.

    `how` names the layer rule, or all of them if several modules share the parameter. "generic" is the fallback for a
    module, "by operation" the fallback for a parameter outside any layer; "frozen" and "unused" parameters have no
    gradient.
    """

    parameter: str
    shape: tuple[int, ...]
    how: str


@dataclass(frozen=True)
class CheckReport:
    """What `clipless.check` found. `problems` is empty for a sound model. Figures that were not computed are NaN."""

    handling: tuple[Handling, ...]
    records: int
    oracle_error: float
    largest_change: float
    sensitivity: float
    changed_buffers: tuple[str, ...]
    problems: tuple[str, ...]
    tolerance: float = TOLERANCE

    @property
    def sound(self) -> bool:
        return not self.problems

    @property
    def oracle_agreement(self) -> bool | None:
        """Whether the engine agrees with the loop over single records; None if nothing was compared."""
        return self.oracle_error <= self.tolerance if self._compared else None

    @property
    def remove_one_record(self) -> bool | None:
        """Whether no record moves the clipped sum by more than the sensitivity; None if nothing was compared."""
        return self.largest_change <= self.sensitivity * (1 + self.tolerance) if self._compared else None

    @property
    def _compared(self) -> bool:
        return not (math.isnan(self.oracle_error) and math.isnan(self.largest_change))

    def raise_if_unsound(self) -> None:
        """Raise `Unsound` with all problems, unless there are none."""
        if self.problems:
            raise Unsound("\n".join(self.problems))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON, with None for a figure that is not finite."""
        figures = {
            name: value if math.isfinite(value) else None
            for name, value in (
                ("oracle_error", self.oracle_error),
                ("largest_change", self.largest_change),
                ("sensitivity", self.sensitivity),
                ("tolerance", self.tolerance),
            )
        }
        return {
            "sound": self.sound,
            "problems": list(self.problems),
            "oracle_agreement": self.oracle_agreement,
            "remove_one_record": self.remove_one_record,
            "records": self.records,
            **figures,
            "changed_buffers": list(self.changed_buffers),
            "parameters": [asdict(row) | {"shape": list(row.shape)} for row in self.handling],
        }

    def __str__(self) -> str:
        verdict = "sound" if self.sound else "UNSOUND\n" + "\n".join(self.problems)
        return "\n\n".join([aligned(_HEADER, [_cells(row) for row in self.handling]), self._verdicts(), verdict])

    def _verdicts(self) -> str:
        error = f"relative error {self.oracle_error:.1e} over {self.records} records, tolerance {self.tolerance:.0e}"
        buffers = f"{', '.join(self.changed_buffers)} changed" if self.changed_buffers else "unchanged"
        change = f"the clipped sum moves by {self.largest_change:.4g}, sensitivity {self.sensitivity:.4g}"
        return "\n".join(
            [
                f"oracle agreement   {_verdict(self.oracle_agreement, error)}",
                f"remove one record  {_verdict(self.remove_one_record, change)}",
                f"buffers            {buffers}",
            ]
        )


_HEADER = ("parameter", "shape", "handled by")


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns, under a header.

    >>> print(aligned(("name", "size"), [("a", "12"), ("longer", "3")]))
    name    size
    a       12
    longer  3
    """
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cells(row: Handling) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    how = "generic (fallback)" if row.how == "generic" else row.how
    return (row.parameter, shape, how)


def _verdict(holds: bool | None, figures: str) -> str:
    return "not tested" if holds is None else f"{'holds' if holds else 'BROKEN'}: {figures}"
