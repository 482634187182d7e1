"""A schema from a public table: the one place where rules are computed from rows."""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from clipless.app.data.own.reading import MISSING, Table
from clipless.app.data.own.rules import as_date, as_number
from clipless.app.data.own.texts import words

MOST_CATEGORIES, MOST_CLASSES = 50, 20
WORDS_OF_A_TEXT, WORD_COLUMNS = 4, 256


def public_schema(table: Table, target: Sequence[str] = ()) -> dict[str, Any]:
    """Rules for every column of a public table, and the table's digest, so that training on that very table is refused.

    Numbers and dates get the range of their values, and the median for missing ones; texts their categories. Where there
    are more than 50, texts of usually 4 words or more get `word_counts`, and others, such as identifiers, `use = false`. A
    target of up to 20 whole numbers or texts gets them as its classes.
    """
    rules = {name: _rule(texts, name in target) for name, texts in table.columns.items()}
    return {"made_from": table.digest, "columns": rules}


def _rule(texts: Sequence[str], is_target: bool) -> dict[str, Any]:
    known = [text for text in texts if text.lower() not in MISSING]
    has_missing = len(known) < len(texts)
    numbers, dates = [as_number(text) for text in known], [as_date(text) for text in known]
    if known and is_target and _are_classes(known, numbers):
        return {"categories": sorted(set(known), key=lambda text: (as_number(text) or 0.0, text))}
    if known and None not in numbers:
        found = [number for number in numbers if number is not None]
        low, high = min(found), max(found)
        ends = {"low": _plain(low), "high": _plain(high if low < high else low + 1)}
        return ends | ({"missing": _plain(median(found))} if has_missing and not is_target else {})
    if len(set(dates) - {None}) > 1 and None not in dates:
        days = sorted(date for date in dates if date is not None)
        return {"low": days[0], "high": days[-1]} | ({"missing": days[len(days) // 2]} if has_missing else {})
    if known and len(set(known)) <= MOST_CATEGORIES:
        return {"categories": [text for text, _ in Counter(sorted(known)).most_common()]}
    if known and not is_target and median(len(words(text)) for text in known) >= WORDS_OF_A_TEXT:
        return {"word_counts": WORD_COLUMNS}
    return {"use": False}


def _are_classes(known: Sequence[str], numbers: Sequence[float | None]) -> bool:
    whole = None in numbers or all(number is not None and number == math.floor(number) for number in numbers)
    return whole and 2 <= len(set(known)) <= MOST_CLASSES


def _plain(number: float) -> float | int:
    return int(number) if number == math.floor(number) and abs(number) < 2**53 else number
