"""Public rules for columns: from the texts of a column to numbers, each cell by itself.

A rule is stated in a schema file or a configuration, as a table with one of

    low, high       a number (or a date) from a public range; cut off there, then scaled to [-1, 1]
    centre, scale   a number; (value - centre) / scale
    categories      a list; one column for each, and one for every other value, a missing one included
    word_counts     a text; how often each word occurs, in this many columns
    tokens          a text, as this many words, for a model of texts; no other column is used beside it
    use = false     the column is left out

and, for numbers and dates, `missing`, the value used for a missing one. A column without a rule is a number that is used as
it is.
"""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from clipless.app.data.dataset import Array
from clipless.app.data.own.reading import MISSING, Table
from clipless.app.data.own.texts import TokensColumn, WordCountsColumn
from clipless.arguments import unknown_name
from clipless.errors import InvalidArgument

LARGEST = float(np.finfo(np.float32).max)
KINDS = (("low", "high"), ("centre", "scale"), ("categories",), ("word_counts",), ("tokens",), ("use",))
KEYS = (*(key for kind in KINDS for key in kind), "missing")
MOST_WORDS = 100_000
EXAMPLES = (
    "low = 0, high = 120, or centre = 40, scale = 15, or categories = ['a', 'b'], or word_counts = 256 for a text, or "
    "use = false"
)


class ColumnRule(Protocol):
    """How the cells of a column become numbers."""

    def encode(self, table: Table, name: str) -> Array:
        """An array of [rows, width]."""


@dataclass(frozen=True)
class NumberColumn:
    """(value - centre) / scale, cut off at `bound` if there is one. `stated` says whether a range or scale was given."""

    centre: float = 0.0
    scale: float = 1.0
    bound: float | None = None
    missing: float | None = None
    stated: bool = False
    dates: bool = False

    def encode(self, table: Table, name: str) -> Array:
        values = np.array([self._value(table, name, row, text) for row, text in enumerate(table.columns[name])])
        scaled: Array = (values - self.centre) / self.scale
        return (scaled if self.bound is None else scaled.clip(-self.bound, self.bound))[:, None]

    def _value(self, table: Table, name: str, row: int, text: str) -> float:
        if text.lower() in MISSING:
            if self.missing is None:
                shown = _shown(table, name)
                raise InvalidArgument(
                    f"{table.label(name)} of {table.path} has missing values. State a value to use instead (missing = ... "
                    f"in [columns.{shown}]), leave the column out (--drop {shown}), or remove such rows yourself."
                )
            return self.missing
        value = _day(text) if self.dates else as_number(text)
        if value is None or abs(value) > LARGEST:
            kind = "date (such as 2026-01-31)" if self.dates else "number"
            raise InvalidArgument(
                f"{table.place(row)}, {table.label(name)}, is not a {kind}{_hint(text)}. Correct it, state the column's "
                f"rule in --schema ({EXAMPLES}), or leave it out: --drop {_shown(table, name)}."
            )
        return value


@dataclass(frozen=True)
class CategoryColumn:
    """A column for each category, and one for everything else."""

    values: tuple[str, ...]

    def encode(self, table: Table, name: str) -> Array:
        places = self.places(table.columns[name])
        return np.eye(len(self.values) + 1)[[len(self.values) if place is None else place for place in places]]

    def places(self, texts: Sequence[str]) -> list[int | None]:
        """The number of each text's category; None for a text in no category. Numbers are compared as numbers: 1.0 is in
        the category 1."""
        known = {value: place for place, value in enumerate(self.values)}
        numbers: dict[float, int] = {}
        for value, place in known.items():
            if (number := as_number(value)) is not None:
                numbers.setdefault(number, place)

        def place_of(text: str) -> int | None:
            number = as_number(text)
            return known.get(text, None if number is None else numbers.get(number))

        found = {text: place_of(text) for text in set(texts)}
        return [found[text] for text in texts]


@dataclass(frozen=True)
class UnusedColumn:
    """The column is left out."""

    def encode(self, table: Table, name: str) -> Array:
        return np.zeros((len(table), 0))


AS_IT_IS = NumberColumn()


def encode(table: Table, rules: Mapping[str, ColumnRule]) -> Array:
    """The columns of `rules` side by side, in its order."""
    return np.concatenate([rule.encode(table, name) for name, rule in rules.items()], axis=1)


def rule_of(name: str, stated: object) -> ColumnRule:
    """The rule that a schema states for a column. Raises InvalidArgument for one that makes no sense."""
    if not isinstance(stated, Mapping):
        raise _refusal(name, f"is not a table: write [columns.{_key(name)}] with {EXAMPLES}")
    for key in stated:
        if key not in KEYS:
            raise unknown_name(f"key in [columns.{_key(name)}]", key, KEYS)
    kinds = [kind for kind in KINDS if set(kind) & {*stated}]
    if len(kinds) > 1:
        raise _refusal(name, f"states {' and '.join(kind[0] for kind in kinds)}, which contradict each other: keep one")
    if kinds and not {*kinds[0]} <= {*stated}:
        raise _refusal(name, f"lacks {' or '.join({*kinds[0]} - {*stated})}: state both {' and '.join(kinds[0])}")
    if kinds == [("categories",)]:
        return _categories(name, stated)
    if kinds in ([("word_counts",)], [("tokens",)]):
        return _text_rule(name, kinds[0][0], stated)
    if "use" in stated:
        if stated["use"] is not False:
            raise _refusal(name, "states use, which can only be false: leave it out to use the column")
        return UnusedColumn()
    return _number_rule(name, stated)


def _categories(name: str, stated: Mapping[str, Any]) -> CategoryColumn:
    values = stated["categories"]
    if "missing" in stated:
        raise _refusal(
            name, "takes no missing: a missing value is in none of the categories. List '' to have a category for it"
        )
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, (str, int, float)) for value in values):
        raise _refusal(name, "must list its categories: categories = ['a', 'b']")
    texts = tuple(_text(value) for value in values)
    if not texts or len(set(texts)) < len(texts):
        raise _refusal(name, "must list at least one category, and each once")
    return CategoryColumn(texts)


def _text_rule(name: str, kind: str, stated: Mapping[str, Any]) -> WordCountsColumn | TokensColumn:
    count = stated[kind]
    if "missing" in stated:
        raise _refusal(name, "takes no missing: an empty cell is a text without words")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_WORDS:
        raise _refusal(name, f"has {kind} that is not a whole number from 1 to {MOST_WORDS}: 256 columns, or 48 words")
    return WordCountsColumn(count) if kind == "word_counts" else TokensColumn(count)


def _number_rule(name: str, stated: Mapping[str, Any]) -> NumberColumn:
    dates = isinstance(stated.get("low"), datetime.date)
    read = _days if dates else _finite
    low, high, missing = (read(name, key, stated.get(key)) for key in ("low", "high", "missing"))
    if low is not None and high is not None:
        if low >= high:
            raise _refusal(name, "has a low that is not below its high: swap them")
        return NumberColumn((low + high) / 2, (high - low) / 2, 1.0, missing, stated=True, dates=dates)
    centre, scale = (_finite(name, key, stated.get(key)) for key in ("centre", "scale"))
    if scale is not None and scale <= 0:
        raise _refusal(name, "has a scale that is not positive: choose a typical distance from the centre")
    return NumberColumn(centre or 0.0, scale or 1.0, None, missing, stated=scale is not None)


def _finite(name: str, key: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise _refusal(name, f"has a {key} that is not a finite number: state one that is known without the records")
    return float(value)


def _days(name: str, key: str, value: object) -> float | None:
    if value is None and key == "missing":
        return None
    if not isinstance(value, datetime.date):
        raise _refusal(name, f"has a date as its low and a {key} that is not one: write {key} = 2026-01-31")
    return float(value.toordinal())


def as_date(text: str) -> datetime.date | None:
    """The date of a text in ISO form, with or without a time."""
    try:
        return datetime.datetime.fromisoformat(text).date()
    except ValueError:
        return None


def as_number(text: str) -> float | None:
    """The text as a finite number, or None; true and false are 1 and 0."""
    try:
        value = None if "_" in text else float({"true": "1", "false": "0"}.get(text.lower(), text))
    except ValueError:
        return None
    return value if value is not None and math.isfinite(value) else None


def _day(text: str) -> float | None:
    date = as_date(text)
    return None if date is None else float(date.toordinal())


def _hint(text: str) -> str:
    if _day(text) is not None:
        return " but a date"
    if as_number(text.replace(",", ".")) is not None:
        return " (write decimals with a point)"
    return ""


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def _shown(table: Table, name: str) -> str:
    """The name in a remedy, if it may be shown."""
    return _key(name) if name in table.stated else "NAME"


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else f'"{name}"'


def _refusal(name: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"[columns.{_key(name)}] {what}.")
