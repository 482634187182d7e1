"""Options that say which data is trained on, and what is known about it without looking at it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from clipless.app import names
from clipless.app.options.common import DATA_PANEL, starting


@dataclass(frozen=True)
class DataGroup:
    """A data set and, for a table of the user's own, its target and the public rules of its columns."""

    data: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(names.DATA)}, a folder of idx files (MNIST format), FILE.npz, FILE.csv, FILE.parquet, or "
            "package.module:function.",
            autocompletion=starting(names.DATA),
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
        typer.Option(
            help="Of the target: no,yes, or 3 for 0, 1, 2. Never inferred from the rows.", rich_help_panel=DATA_PANEL
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(names.TASKS)}. Default: labels for several targets; classes or regression by what is stated "
            "about the target.",
            autocompletion=starting(names.TASKS),
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
