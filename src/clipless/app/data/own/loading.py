"""From a table and what is stated about it to a data set."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from clipless.app.data.dataset import Array, Data, make_data, make_targets, make_texts
from clipless.app.data.own.choice import OwnData
from clipless.app.data.own.reading import TABLE_ENDS, YES_OR_NO, Table, read
from clipless.app.data.own.rules import (
    AS_IT_IS,
    CategoryColumn,
    ColumnRule,
    NumberColumn,
    UnusedColumn,
    encode,
    rule_of,
)
from clipless.app.data.own.splitting import test_rows
from clipless.app.data.own.texts import TokensColumn, WordCountsColumn
from clipless.errors import InvalidArgument

NOT_SCALED = (
    "{columns}: used as numbers, as they are. Columns of different sizes train badly; state ranges that are known without "
    "the records in --schema (low, high)."
)


def load_table(path: Path, stated: OwnData) -> Data:
    """The data set in a csv or Parquet file.

    The test records are those of `stated.test`, or about a fifth of the rows (`splitting`). Raises InvalidArgument, with
    the column, for whatever has no public rule.
    """
    table = read(path, _named(stated))
    _refuse_own_schema(table, stated)
    rules = _rules(table, stated)
    task = _task(table, stated, rules)
    features = [
        name for name in table.columns if name not in stated.target and not isinstance(rules[name], UnusedColumn)
    ]
    if not features:
        raise InvalidArgument(f"{path} has no column besides the target: there is nothing to predict from.")
    vocabulary = _vocabulary(rules, features)
    train, test = _parts(table, stated, rules, features, task)
    columns = _described(stated, rules, features, task) | {"vocabulary": vocabulary}
    name = next(path.name.removesuffix(end) for end in sorted(TABLE_ENDS, key=len)[::-1] if path.name.endswith(end))
    outputs = len(_classes(stated, rules).values) if task == "classes" else len(stated.target)
    if vocabulary is not None:
        made = make_texts(name, train, test, outputs, vocabulary, task)
    elif task == "classes":
        made = make_data(name, train, test, outputs)
    else:
        made = make_targets(name, train, test, task)
    plain = [column for column in features if _as_it_is(rules[column])]
    notes = (NOT_SCALED.format(columns=", ".join(plain)),) if plain else ()
    return replace(made, columns=columns, notes=notes)


def _named(stated: OwnData) -> tuple[str, ...]:
    """The columns that the user has named."""
    return (*stated.target, *stated.drop, *stated.columns)


def _refuse_own_schema(table: Table, stated: OwnData) -> None:
    if stated.made_from == table.digest:
        raise InvalidArgument(
            f"the schema was made from {table.path} itself, so its ranges and categories were computed from the records "
            "that it should protect. Make it from a public table, or write it from what the columns mean; if the records "
            "are public, remove the line made_from."
        )


def _rules(table: Table, stated: OwnData) -> dict[str, ColumnRule]:
    """The rule of every column. Raises for a stated name that the table does not have, with the nearest one."""
    if not stated.target:
        raise InvalidArgument(
            f"which of the {len(table.columns)} columns of {table.path} is to be predicted? Give --target NAME, as in its "
            "first line."
        )
    for kind, names in (("target", stated.target), ("dropped column", stated.drop), ("column", stated.columns)):
        for name in names:
            if name not in table.columns:
                raise table.unknown_column(kind, name)
    if len(set(stated.target)) < len(stated.target):
        raise InvalidArgument("a target is given twice: give each once.")
    rules = dict.fromkeys(table.columns, AS_IT_IS) | {
        name: rule_of(name, rule) for name, rule in stated.columns.items()
    }
    rules |= {name: UnusedColumn() for name in stated.drop}
    for name in stated.target:
        if isinstance(rules[name], UnusedColumn):
            raise InvalidArgument(f"the target {name!r} is left out of the table: keep it, or predict another column.")
        if isinstance(rules[name], (TokensColumn, WordCountsColumn)):
            raise InvalidArgument(f"the target {name!r} is a text: list its categories, or predict another column.")
    return rules


def _vocabulary(rules: Mapping[str, ColumnRule], features: Sequence[str]) -> int | None:
    """The number of tokens if the records are tokens; None if they are numbers."""
    tokens = [(name, rule) for name in features if isinstance(rule := rules[name], TokensColumn)]
    if not tokens:
        return None
    name, rule = tokens[0]
    if len(features) > 1:
        raise InvalidArgument(
            f"{name!r} is stated as tokens, which a model takes alone, and there are other columns: state word_counts = 256 "
            f"for {name!r}, or leave the others out (--drop)."
        )
    return rule.vocabulary


def _task(table: Table, stated: OwnData, rules: Mapping[str, ColumnRule]) -> str:
    """The stated task; otherwise labels for several targets, classes if they are stated, a number if its range is."""
    target, given = rules[stated.target[0]], stated.stated_task()
    listed = stated.classes is not None or isinstance(target, CategoryColumn)
    if stated.classes is not None and (len(stated.target) > 1 or given not in (None, "classes")):
        raise InvalidArgument(
            "--classes is for one target that has classes: leave out --classes, or --task and the other targets."
        )
    task = given or ("labels" if len(stated.target) > 1 else "classes" if listed else "numbers")
    if task == "classes" and len(stated.target) > 1:
        raise InvalidArgument("several targets are labels or numbers: give --task labels or regression, or one target.")
    if (task == "classes" and not listed) or (given is None and task == "numbers" and _as_it_is(target)):
        raise InvalidArgument(
            f"which classes does {stated.target[0]!r} have? They are not inferred from the records: give --classes no,yes, "
            "or --classes 3 for 0, 1, 2, list its categories in --schema, or predict a number with --task regression."
        )
    return task


def _as_it_is(rule: ColumnRule) -> bool:
    return isinstance(rule, NumberColumn) and not rule.stated


def _parts(
    table: Table, stated: OwnData, rules: Mapping[str, ColumnRule], features: Sequence[str], task: str
) -> list[tuple[Array, Array]]:
    """Features and targets of the training and of the test records."""
    if stated.test is None:
        test = np.array(test_rows(table))
        if test.all() or not test.any():
            raise InvalidArgument(
                f"{table.path} has too few rows to set some aside for testing. Give test records of their own: --test FILE."
            )
        x, y = _encoded(table, stated, rules, features, task)
        return [(x[~test], y[~test]), (x[test], y[test])]
    other = read(Path(stated.test).expanduser(), _named(stated))
    for name in (*features, *stated.target):
        if name not in other.columns:
            raise InvalidArgument(
                f"{other.path} lacks {table.label(name)} of {table.path}: give both the same columns."
            )
    return [_encoded(one, stated, rules, features, task) for one in (table, other)]


def _encoded(
    table: Table, stated: OwnData, rules: Mapping[str, ColumnRule], features: Sequence[str], task: str
) -> tuple[Array, Array]:
    x = encode(table, {name: rules[name] for name in features})
    if task == "classes":
        return x, _class_numbers(table, stated.target[0], _classes(stated, rules))
    target = _label if task == "labels" else _number
    return x, np.concatenate([target(table, name, rules[name]) for name in stated.target], axis=1)


def _classes(stated: OwnData, rules: Mapping[str, ColumnRule]) -> CategoryColumn:
    names = stated.class_names()
    if names is not None:
        return CategoryColumn(tuple(names))
    rule = rules[stated.target[0]]
    assert isinstance(rule, CategoryColumn)
    if len(rule.values) < 2:
        raise InvalidArgument(f"the target {stated.target[0]!r} has one class: list at least two.")
    return rule


def _class_numbers(table: Table, name: str, classes: CategoryColumn) -> Array:
    places = classes.places(table.columns[name])
    if None in places:
        raise InvalidArgument(
            f"{table.place(places.index(None))}, the target {name!r}, is none of the {len(classes.values)} classes that are "
            "stated. List all classes, or remove such rows yourself."
        )
    return np.array(places, dtype=np.int64)


def _label(table: Table, name: str, rule: ColumnRule) -> Array:
    """Zeros and ones: of two categories the second is 1; otherwise 0, 1, false, true, no, yes."""
    if isinstance(rule, CategoryColumn):
        if len(rule.values) != 2:
            raise InvalidArgument(
                f"the label {name!r} has {len(rule.values)} categories: list two, the second counts as 1."
            )
        return _class_numbers(table, name, rule).astype(np.float64)[:, None]
    values = [YES_OR_NO.get(text.lower()) for text in table.columns[name]]
    if None in values:
        raise InvalidArgument(
            f"{table.place(values.index(None))}, the label {name!r}, is none of {', '.join(YES_OR_NO)}. Correct it, or list "
            f"two categories in --schema, of which the second counts as 1."
        )
    return np.array(values, dtype=np.float64)[:, None]


def _number(table: Table, name: str, rule: ColumnRule) -> Array:
    if not isinstance(rule, NumberColumn):
        raise InvalidArgument(
            f"the target {name!r} has categories, and --task regression predicts numbers: choose one."
        )
    return rule.encode(table, name)


def _described(stated: OwnData, rules: Mapping[str, ColumnRule], features: Sequence[str], task: str) -> dict[str, Any]:
    """What has to be known to use the model on other records."""
    return {
        "features": list(features),
        "target": list(stated.target),
        "task": task,
        "classes": list(_classes(stated, rules).values) if task == "classes" else None,
        "rules": {name: _without_dates(rule) for name, rule in stated.columns.items()},
    }


def _without_dates(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule as plain data for JSON."""
    return {key: str(value) if isinstance(value, datetime.date) else value for key, value in rule.items()}
