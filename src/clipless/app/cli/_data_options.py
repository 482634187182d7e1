"""Options that say which data is trained on, and what is known about it without looking at it."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from clipless.app import data as data_sets
from clipless.app.cli._training_options import DATA_PANEL, starting
from clipless.app.data import DATA, Data, OwnData
from clipless.arguments import unknown_name
from clipless.errors import InvalidArgument

SCHEMA_KEYS = ("columns", "made_from")


@dataclass(frozen=True)
class DataGroup:
    """A data set and, for a table of the user's own, its target and the public rules of its columns."""

    data: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(DATA)}, a folder of idx files (MNIST format), FILE.npz, FILE.csv, FILE.parquet, or "
            "package.module:function.",
            autocompletion=starting(DATA),
            rich_help_panel=DATA_PANEL,
        ),
    ] = "digits"
    data_dir: Annotated[
        str | None,
        typer.Option(
            "--data-dir",
            help="Folder of data sets' files. Default: those in CLIPLESS_DATA.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None
    target: Annotated[
        list[str] | None,
        typer.Option(help="Of a table: the column to predict; several times for labels.", rich_help_panel=DATA_PANEL),
    ] = None
    classes: Annotated[
        str | None,
        typer.Option(help="Of the target: no,yes, or 3 for 0, 1, 2. Never read off.", rich_help_panel=DATA_PANEL),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help="classes, regression or labels. Default: labels for several targets; classes or a number by what is "
            "stated about the target.",
            autocompletion=starting(("classes", "regression", "labels")),
            rich_help_panel=DATA_PANEL,
        ),
    ] = None
    schema: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with the public rules of the columns (docs/own_data.md).", rich_help_panel=DATA_PANEL
        ),
    ] = None
    drop: Annotated[
        list[str] | None,
        typer.Option(help="Of a table: a column to leave out; repeatable.", rich_help_panel=DATA_PANEL),
    ] = None
    test: Annotated[
        str | None,
        typer.Option(help="A table of test records. Default: about a fifth of the rows.", rich_help_panel=DATA_PANEL),
    ] = None

    def own(self, columns: Mapping[str, Any] | None = None, made_from: str | None = None) -> OwnData:
        """What is stated about the data, the rules of `columns` (from a configuration file) under those of --schema."""
        read, origin = (read_schema(self.schema)) if self.schema else ({}, None)
        return OwnData(
            target=tuple(self.target or ()),
            task=self.task,
            classes=self.classes,
            columns={**(columns or {}), **read},
            made_from=origin or made_from,
            drop=tuple(self.drop or ()),
            test=self.test,
        )

    def load(self, columns: Mapping[str, Any] | None = None, made_from: str | None = None) -> Data:
        """The data set. Raises InvalidArgument with the remedy."""
        return data_sets.load(self.data, self.data_dir, self.own(columns, made_from))

    def remote(self) -> str | None:
        """What other processes can load by themselves: a name unchanged, a path made absolute; None if they cannot."""
        if self.data_dir or any(asdict(self.own()).values()) or ":" in self.data:
            return None
        return self.data if self.data in DATA else str(Path(self.data).expanduser().resolve())


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The contents of a TOML file. Raises InvalidArgument if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidArgument(f"cannot read the {what} {path} ({error}). Give the path of a TOML file.") from error
    except ValueError as error:
        raise InvalidArgument(f"{path} is not TOML ({error}). Write lines such as  epsilon = 3.0.") from error


def read_schema(path: Path) -> tuple[dict[str, Any], str | None]:
    """The rules of the columns in a schema file, and the digest of the file that it was made from."""
    content = read_toml(path, "schema")
    for name in content:
        if name not in SCHEMA_KEYS:
            raise unknown_name(f"key in {path}", name, SCHEMA_KEYS)
    return checked_columns(content.get("columns", {}), path), content.get("made_from")


def checked_columns(columns: object, path: Path) -> dict[str, Any]:
    if not isinstance(columns, dict):
        raise InvalidArgument(f"columns in {path} is a value: write a table [columns.NAME] for each column.")
    return columns
