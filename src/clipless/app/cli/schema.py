"""`clipless schema`: rules for the columns of a table, made from a public one."""

from pathlib import Path
from typing import Annotated

import typer

from clipless.app.cli import _output
from clipless.app.cli._options import JsonOption
from clipless.app.data.own.public_schema import public_schema
from clipless.app.data.own.reading import read
from clipless.app.toml_text import toml_text
from clipless.arguments import unknown_name

WARNING = (
    "Everything in a schema is computed from the rows of its table, without privacy: make it from a public table only. "
    "clipless train refuses a schema that was made from the table it trains on."
)


def schema(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A public table, csv or Parquet.")],
    target: Annotated[
        list[str] | None, typer.Option(help="A column to predict: up to 20 whole numbers or texts are its classes.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Rules for the columns of a table, from a public table of the same form: ranges, categories, missing values.

    Prints TOML for --schema of train. Look it through: widen ranges that the public table does not fill, list categories
    that it lacks, and leave out columns that identify people.
    """
    found = read(table)
    for name in target or []:
        if name not in found.columns:
            raise unknown_name(f"target (not in {table})", name, found.columns)
    made = public_schema(found, target or [])
    if as_json:
        rules = {name: {key: _plain(one) for key, one in rule.items()} for name, rule in made["columns"].items()}
        _output.show_json(made | {"columns": rules, "notes": [WARNING]})
        return
    typer.echo(f"# From {table.name}, which must be public.\n{toml_text(made)}", nl=False)
    _output.show_note(WARNING)


def _plain(value: object) -> object:
    return value if isinstance(value, (int, float, str, list)) else str(value)
