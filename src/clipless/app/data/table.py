"""Tables of numbers in csv files. An error names the line, the column and the remedy."""

import csv
import gzip
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from clipless.app.data.dataset import Array
from clipless.errors import InvalidArgument

LARGEST = float(np.finfo(np.float32).max)


def read_table(path: Path) -> Array:
    """The numbers below the header, [rows, columns]; the last column holds classes 0, 1, 2, ...

    Empty lines are skipped. Raises InvalidArgument for a cell that is no finite number of float32, for a row that is
    longer or shorter than the header, and for a class that is no whole number from 0, with the line as an editor
    counts it.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = [(n, s) for n, s in enumerate(text.decode("utf-8-sig").splitlines(), start=1) if s.strip()]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InvalidArgument(f"{path} cannot be read ({error}). Save it as UTF-8 text.") from error
    (at, header), *rows = lines or [(1, "")]
    separator = "," if "," in header else ";"
    names = [name.strip() for name in _cells(header, separator)]
    if rows and names and _number(names[0]) is not None and _number(names[-1]) is not None:
        raise InvalidArgument(f"line {at} of {path} has numbers. Put a header with the column names in the first line.")
    if len(names) < 2 or not rows:
        raise InvalidArgument(f"{path} is empty: it needs a header, and rows of features with the class in the end.")
    try:
        table: Array = np.loadtxt([row for _, row in rows], delimiter=separator, ndmin=2, comments=None, quotechar='"')
        sound = table.shape[1] == len(names) and _all_usable(table)
    except ValueError as error:
        _refuse_first_fault(path, names, ((number, _cells(row, separator)) for number, row in rows))
        raise InvalidArgument(f"{path} is not a table of numbers ({error}). Save it again as csv.") from error
    if not sound:
        _refuse_first_fault(path, names, ((number, _cells(row, separator)) for number, row in rows))
    return table


def _all_usable(table: Array) -> bool:
    labels = table[:, -1]
    return bool((np.abs(table) <= LARGEST).all() and (labels >= 0).all() and np.array_equal(labels, np.floor(labels)))


def _refuse_first_fault(path: Path, names: Sequence[str], rows: Iterable[tuple[int, list[str]]]) -> None:
    for number, cells in rows:
        if len(cells) != len(names):
            raise InvalidArgument(
                f"line {number} of {path} has {_counted(cells, 'cell')} and the header {_counted(names, 'name')}. "
                "Give every column a name, and every row a cell in each column."
            )
        for place, (name, cell) in enumerate(zip(names, cells, strict=True)):
            if fault := _fault(cell, is_label=place == len(names) - 1):
                raise InvalidArgument(f"line {number} of {path}, column {name!r}, {fault}")


def _fault(cell: str, *, is_label: bool) -> str | None:
    """What is wrong with a cell, and what to do about it."""
    value, shown = _number(cell), repr(cell.strip())
    if not cell.strip():
        return "is empty. Fill it in, or drop the row."
    if value is None and re.fullmatch(r"\s*[-+]?\d+,\d+\s*", cell):
        return f"is {shown}. Write decimals with a point."
    if value is None:
        return f"is {shown}, which is no number. Encode text columns as numbers" + (
            ", and number the classes 0, 1, 2, ..." if is_label else "."
        )
    if not abs(value) <= LARGEST:
        return f"is {shown}, which is not finite in float32. Repair it, or drop the row."
    if is_label and (value < 0 or value != int(value)):
        wrong = "negative" if value < 0 else "no integer"
        return f"is {shown}, which is {wrong}. The last column is the class: number the classes 0, 1, 2, ..."
    return None


def _cells(line: str, separator: str) -> list[str]:
    return next(csv.reader([line], delimiter=separator), [])


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def _counted(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}" + ("" if len(things) == 1 else "s")
