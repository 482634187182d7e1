"""TOML files of the user's: configurations, and schemas of tables."""

import tomllib
from pathlib import Path
from typing import Any

from clipless.arguments import unknown_name
from clipless.errors import InvalidArgument

SCHEMA_KEYS = ("columns", "made_from")


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The contents of a TOML file. Raises InvalidArgument if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidArgument(f"cannot read the {what} {path} ({error}). Give the path of a TOML file.") from error
    except ValueError as error:
        raise InvalidArgument(f"{path} is not TOML ({error}). Write lines such as  epsilon = 3.0.") from error


def read_schema(path: Path) -> tuple[dict[str, Any], str | None]:
    """The rules of the columns in a schema file, and the digest of the table that it was made from."""
    content = read_toml(path, "schema")
    for name in content:
        if name not in SCHEMA_KEYS:
            raise unknown_name(f"key in {path}", name, SCHEMA_KEYS)
    return checked_columns(content.get("columns", {}), path), content.get("made_from")


def checked_columns(columns: object, path: Path) -> dict[str, Any]:
    """The tables of the columns. Raises InvalidArgument if there is a value in their place."""
    if not isinstance(columns, dict):
        raise InvalidArgument(f"columns in {path} is a value: write a table [columns.NAME] for each column.")
    return columns
