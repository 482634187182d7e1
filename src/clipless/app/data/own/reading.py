"""Tables in csv and Parquet files, as texts by column.

A csv file may have no header, so that its first line is a record. So errors show no name of a column that was not stated.
"""

import codecs
import csv
import datetime
import difflib
import gzip
import hashlib
import io
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipless.errors import InvalidArgument, MissingLibrary

PARQUET_ENDS = (".parquet", ".pq")
TABLE_ENDS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", *PARQUET_ENDS)
SEPARATORS = (",", ";", "\t")
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})  # in any case
YES_OR_NO = {"0": 0.0, "1": 1.0, "false": 0.0, "true": 1.0, "no": 0.0, "yes": 1.0}


@dataclass(frozen=True)
class Table:
    """The cells of a file, without spaces around them, by column; an empty text is a missing value. `places` has the line
    of every row in an editor, or its number in a Parquet file; `stated` the columns that the user has named."""

    path: Path
    columns: dict[str, list[str]] = field(repr=False)
    places: Sequence[int] = field(repr=False)
    unit: str
    digest: str
    stated: frozenset[str] = field(default=frozenset(), repr=False)

    def __len__(self) -> int:
        return len(self.places)

    def place(self, row: int) -> str:
        return f"{self.unit} {self.places[row]} of {self.path}"

    def label(self, name: str) -> str:
        """The column in an error: by its name if the user has stated it, otherwise by its number."""
        return f"column {name!r}" if name in self.stated else f"column {1 + list(self.columns).index(name)}"

    def unknown_column(self, kind: str, name: str) -> InvalidArgument:
        """The error for a column that the table does not have, with the nearest one."""
        near = difflib.get_close_matches(name.lower(), [one.lower() for one in self.columns], n=1, cutoff=0.5)
        found = [one for one in self.columns if one.lower() in near]
        hint = ""
        if found:
            hint = (
                f"did you mean {found[0]!r}? " if found[0] in self.stated else f"did you mean {self.label(found[0])}? "
            )
        return InvalidArgument(
            f"{self.path} has no {kind} {name!r}: {hint}Give a name as it stands there. They are not listed here: a table "
            "without a header has a record in their place."
        )


def read(path: Path, stated: Collection[str] = ()) -> Table:
    """The table in a file. Rows without any value are left out. Raises InvalidArgument if it cannot be read as one, and for
    a csv file whose first line looks like a record. Columns in `stated` are names for sure."""
    try:
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).hexdigest()
        content = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidArgument(f"{path} cannot be read ({error}). Check the path, or save it again.") from error
    if path.name.endswith(PARQUET_ENDS):
        unit, (names, columns, places) = "row", _parquet(path, content)
    else:
        unit, (names, columns, places) = "line", _csv(path, content)
    _refuse_names(path, names)
    if unit == "line":
        _refuse_record(path, dict(zip(names, columns, strict=True)), stated)
    if not places:
        raise InvalidArgument(
            f"{path} has no rows: it needs a header with the column names, and a row for each record."
        )
    return Table(path, dict(zip(names, columns, strict=True)), places, unit, digest, frozenset(stated))


def _csv(path: Path, content: bytes) -> tuple[list[str], list[list[str]], list[int]]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        coded = "UTF-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
        raise InvalidArgument(
            f"{path} is not UTF-8 text. Save it as UTF-8, for example:  iconv -f {coded} -t UTF-8 {path.name} > utf8.csv"
        ) from None
    first = next((line for line in text.splitlines() if line.strip()), "")
    separator = max(SEPARATORS, key=first.count)
    # Strict: a quotation mark that is never closed would make one cell of many rows.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    rows, places = [], []
    limit = csv.field_size_limit(max(1, len(text)))  # a text may be long
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                rows.append([cell.strip() for cell in row])
                places.append(reader.line_num)
    except csv.Error as error:
        raise InvalidArgument(
            f"line {reader.line_num} of {path} is not csv ({error}). Close every quotation mark, and save it again."
        ) from None
    finally:
        csv.field_size_limit(limit)
    if not rows:
        raise InvalidArgument(f"{path} is empty: it needs a header with the column names, and a row for each record.")
    names, *cells = rows
    for row, place in zip(cells, places[1:], strict=True):
        if len(row) != len(names):
            raise InvalidArgument(
                f"line {place} of {path} does not have as many cells as the header ({len(names)}). Give every row a cell in "
                "each column, and put cells that contain a separator in quotation marks."
            )
    return names, [list(column) for column in zip(*cells, strict=True)] or [[] for _ in names], places[1:]


def _parquet(path: Path, content: bytes) -> tuple[list[str], list[list[str]], list[int]]:
    pyarrow, parquet = _arrow()
    try:
        table = parquet.ParquetFile(io.BytesIO(content)).read()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be read as Parquet ({type(error).__name__}). Write it again.") from error
    columns = []
    for number, name in enumerate(table.column_names, start=1):
        try:
            texts = table.column(name).cast(pyarrow.string()).to_pylist()
        except (pyarrow.ArrowException, UnicodeDecodeError):
            kind = table.schema.field(name).type
            raise InvalidArgument(
                f"column {number} of {path} is of type {kind}, which is not a number, text or date. Write it without that "
                "column."
            ) from None
        columns.append(["" if text is None else text.strip() for text in texts])
    return [name.strip() for name in table.column_names], columns, list(range(1, table.num_rows + 1))


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingLibrary(
            "Parquet files are read by pyarrow: pip install 'clipless[parquet]', or save the table as csv."
        ) from None
    return pyarrow, parquet


def _refuse_names(path: Path, names: Sequence[str]) -> None:
    if "" in names:
        raise InvalidArgument(
            f"column {names.index('') + 1} of {path} has no name. Name it, or leave it out (pandas: to_csv(index=False))."
        )
    twice = [(names.index(name), place) for place, name in enumerate(names) if name in names[:place]]
    if twice:
        first, second = twice[0]
        raise InvalidArgument(
            f"columns {first + 1} and {second + 1} of {path} have the same name. Give each a name of its own."
        )


def _refuse_record(path: Path, columns: Mapping[str, Sequence[str]], stated: Collection[str]) -> None:
    """Raises InvalidArgument if a name looks like a cell: a number, a date, a missing value, yes or no, or one that occurs
    in its own column."""
    for number, (name, cells) in enumerate(columns.items(), start=1):
        if name not in stated and (is_cell(name) or name in cells):
            raise InvalidArgument(
                f"the first line of {path} looks like a record and not like a header, as column {number} shows: put the "
                "names of the columns there. Change names that are numbers, dates or values of their own column, or state "
                "them in --schema."
            )


def is_cell(text: str) -> bool:
    """Whether a text is rather a value than the name of a column.

    >>> [is_cell(text) for text in ("3.5", "2026-01-31", "NA", "no", "age", "x1")]
    [True, True, True, True, False, False]
    """
    if text.lower() in MISSING or text.lower() in YES_OR_NO:
        return True
    for kind in (float, datetime.datetime.fromisoformat):
        try:
            kind(text)
            return True
        except ValueError:
            continue
    return False
