"""`clipless schema`: rules for the columns of a table, made from a public one."""

from pathlib import Path
from typing import Annotated

import typer

from clipless.app.options.common import JsonOption


def schema(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A public table, csv or Parquet.")],
    target: Annotated[
        list[str] | None, typer.Option(help="A column to predict: up to 20 whole numbers or texts are its classes.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Rules for the columns of a table, from a public table of the same form: ranges, categories, missing values.

    Prints TOML for --schema of train. Read it through: widen ranges that the public table does not fill, list categories
    that it lacks, and leave out columns that identify people.
    """
    from clipless.app.commands.schema import run

    run(table, target or [], as_json=as_json)
