"""Tables in csv and Parquet files, as texts by column."""

import codecs
import csv
import gzip
import hashlib
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipless.errors import InvalidArgument, MissingLibrary

PARQUET_ENDS = (".parquet", ".pq")
TABLE_ENDS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", *PARQUET_ENDS)
SEPARATORS = (",", ";", "\t")


@dataclass(frozen=True)
class Table:
    """The cells of a file, without spaces around them, by column; an empty text is a missing value. `places` has the line
    of every row in an editor, or its number in a Parquet file."""

    path: Path
    columns: dict[str, list[str]] = field(repr=False)
    places: Sequence[int] = field(repr=False)
    unit: str
    digest: str

    def __len__(self) -> int:
        return len(self.places)

    def place(self, row: int) -> str:
        return f"{self.unit} {self.places[row]} of {self.path}"


def read(path: Path) -> Table:
    """The table in a file. Rows without any value are left out. Raises InvalidArgument if it cannot be read as one."""
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
    if not places:
        raise InvalidArgument(
            f"{path} has no rows: it needs a header with the column names, and a row for each record."
        )
    return Table(path, dict(zip(names, columns, strict=True)), places, unit, digest)


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
    if all(_is_number(name) for name in names):
        raise InvalidArgument(f"{path} has no header: put the column names in its first line.")
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
        raise InvalidArgument(f"{path} cannot be read as Parquet ({str(error)[:120]}). Write it again.") from error
    columns = []
    for name in table.column_names:
        try:
            texts = table.column(name).cast(pyarrow.string()).to_pylist()
        except (pyarrow.ArrowException, UnicodeDecodeError):
            kind = table.schema.field(name).type
            raise InvalidArgument(
                f"column {name!r} of {path} is of type {kind}, which is not a number, text or date. Leave it out: --drop "
                f"{name!r}."
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
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise InvalidArgument(f"{path} has two columns {twice[0]!r}. Give each a name of its own.")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
