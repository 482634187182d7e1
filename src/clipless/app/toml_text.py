"""Plain data as TOML text, which Python reads (tomllib) and does not write."""

import datetime
import json
import re
from collections.abc import Mapping
from typing import Any


def toml_text(content: Mapping[str, Any]) -> str:
    """The text of a table: None is left out, mappings become tables of their own after all other values.

    >>> print(toml_text({"columns": {"age": {"low": 0, "high": 120}}, "target": ["paid"], "lr": None}))
    target = ["paid"]
    <BLANKLINE>
    [columns.age]
    low = 0
    high = 120
    <BLANKLINE>
    """
    return "\n".join(_lines(content, ())) + "\n"


def _lines(content: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    values = {key: value for key, value in content.items() if value is not None and not isinstance(value, Mapping)}
    tables = {key: value for key, value in content.items() if isinstance(value, Mapping)}
    head = ["", f"[{'.'.join(map(_key, path))}]"] if path and (values or not tables) else []
    lines = [*head, *(f"{_key(key)} = {_value(value)}" for key, value in values.items())]
    for key, table in tables.items():
        lines += _lines(table, (*path, key))
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (datetime.date, datetime.datetime)):
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    return _string(str(value))


def _string(text: str) -> str:
    """A quoted string. JSON's escapes are TOML's, but for DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
