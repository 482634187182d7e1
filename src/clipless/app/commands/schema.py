"""The body of `clipless schema`."""

from pathlib import Path

import typer

from clipless.app.data.own.public_schema import public_schema
from clipless.app.data.own.reading import read
from clipless.app.terminal import output
from clipless.app.toml_text import toml_text

WARNING = (
    "Everything in a schema is computed from the rows of its table, without privacy: make it from a public table only. "
    "clipless train refuses a schema that was made from the table it trains on."
)


def run(table: Path, target: list[str], *, as_json: bool) -> None:
    """Print the schema of a table."""
    found = read(table, target)
    for name in target:
        if name not in found.columns:
            raise found.unknown_column("target", name)
    made = public_schema(found, target)
    if as_json:
        rules = {name: {key: _plain(one) for key, one in rule.items()} for name, rule in made["columns"].items()}
        output.show_json(made | {"columns": rules, "notes": [WARNING]})
        return
    typer.echo(f"# From {table.name}, which must be public.\n{toml_text(made)}", nl=False)
    output.show_note(WARNING)


def _plain(value: object) -> object:
    return value if isinstance(value, (int, float, str, list)) else str(value)
