"""Grids: from lists of values to the settings of every candidate."""

import itertools
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clipless import defaults
from clipless.accounting.selection import RunShape
from clipless.app import clippings
from clipless.app.settings import TUNABLE, TrainingSettings
from clipless.arguments import unknown_name
from clipless.errors import InvalidArgument, InvalidType
from clipless.phases import as_schedule

OF_CLIPPING = "clipping."  # before the name of one of its parameters, as in clipping.percentile
MOST_CANDIDATES = 10_000


@dataclass(frozen=True)
class Grid:
    """Lists of values to try, and settings that all candidates share."""

    values: Mapping[str, Sequence[Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def candidates(self, shared: TrainingSettings) -> tuple[TrainingSettings, ...]:
        """Every combination, the last list running fastest. A setting in a list wins over the fixed and shared one.

        >>> grid = Grid({"lr": [0.1, 0.2], "clipping": ["auto-s", "dc-e"]}, {"epochs": 5})
        >>> [(c.lr, c.clipping, c.epochs) for c in grid.candidates(TrainingSettings())]
        [(0.1, 'auto-s', 5), (0.1, 'dc-e', 5), (0.2, 'auto-s', 5), (0.2, 'dc-e', 5)]
        """
        lists = {name: [_typed(name, value) for value in _listed(name, self.values[name])] for name in self.values}
        base = _changed(shared, {name: _typed(name, value) for name, value in self.fixed.items()})
        size = 1
        for values in lists.values():
            size *= len(values)
        if size > MOST_CANDIDATES:
            raise InvalidArgument(f"the grid has {size} candidates: try at most {MOST_CANDIDATES}, or fewer values.")
        combinations = itertools.product(*lists.values())
        found = tuple(_changed(base, dict(zip(lists, values, strict=True))) for values in combinations)
        _refuse_unusable(found)
        return found

    def merged(self, other: "Grid") -> "Grid":
        """This grid with the lists and settings of another, which win."""
        return Grid({**self.values, **other.values}, {**self.fixed, **other.fixed})

    def as_lists(self) -> dict[str, list[Any]]:
        """The same candidates as lists alone, of one value for each shared setting.

        >>> Grid({"lr": ["0.1", "0.2"]}, {"momentum": 0.5}).as_lists()
        {'momentum': [0.5], 'lr': [0.1, 0.2]}
        """
        lists = {name: [value] for name, value in self.fixed.items()} | dict(self.values)
        return {name: [_typed(name, value) for value in _listed(name, values)] for name, values in lists.items()}


def read_grid(path: Path) -> Grid:
    """The grid in a TOML file: a table `[grid]` of lists, and `[settings]` of single values that all share."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"cannot read the grid {path} ({error}). Give the path of a TOML file.") from error
    except ValueError as error:
        raise InvalidArgument(f"{path} is not TOML ({error}). Write lists, as in  [grid] lr = [0.1, 0.2].") from error
    for name in content:
        if name not in ("grid", "settings"):
            raise unknown_name(f"table in {path}", name, ("grid", "settings"))
        if not isinstance(content[name], dict):
            raise InvalidArgument(f"{name} in {path} is a value: write a table [{name}] with one line per setting.")
    return Grid(flattened(content.get("grid", {})), flattened(content.get("settings", {})))


def flattened(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table in which `clipping.percentile`, for TOML a table within a table, is one key.

    >>> flattened({"lr": [0.1], "clipping": {"percentile": [0.3]}})
    {'lr': [0.1], 'clipping.percentile': [0.3]}
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def parse_tries(tries: Sequence[str]) -> Grid:
    """The grid of command-line arguments like `lr=0.05,0.1` and `clipping.percentile=0.1,0.3`.

    >>> parse_tries(["lr=0.05,0.1", "clipping=auto-s,dc-e"]).values
    {'lr': ['0.05', '0.1'], 'clipping': ['auto-s', 'dc-e']}
    """
    values: dict[str, list[str]] = {}
    for text in tries:
        name, equals, listed = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not listed:
            raise InvalidArgument(f"{text!r} names no values: write for example lr=0.05,0.1,0.2.")
        if name in values:
            raise InvalidArgument(f"{name} is given twice: write all its values in one list.")
        values[name] = clippings.split(listed)
    return Grid(values)


def shape_of(settings: TrainingSettings, records: int) -> RunShape:
    """What a run with these settings releases, without its noise, on a data set of that size."""
    per_pass = defaults.steps_per_pass(records, settings.batch_size)
    steps = settings.epochs * per_pass
    return RunShape.of(
        settings.batch_size / records, steps, as_schedule(clippings.parse(settings.clipping)).noise_schedule(steps)
    )


def varied(candidates: Sequence[TrainingSettings]) -> tuple[str, ...]:
    """The settings in which candidates differ."""
    return tuple(name for name in TUNABLE if len({getattr(one, name) for one in candidates}) > 1)


def _changed(settings: TrainingSettings, values: Mapping[str, Any]) -> TrainingSettings:
    """The settings with other values, those of the clipping's own parameters last."""
    own = {name.removeprefix(OF_CLIPPING): value for name, value in values.items() if name.startswith(OF_CLIPPING)}
    made = replace(settings, **{name: value for name, value in values.items() if not name.startswith(OF_CLIPPING)})
    for name, value in own.items():
        made = replace(made, clipping=clippings.with_parameter(made.clipping, name, str(value)))
    return made


def _listed(name: str, values: object) -> Sequence[Any]:
    if name not in TUNABLE and not name.startswith(OF_CLIPPING):
        if name in TrainingSettings.__dataclass_fields__:
            raise InvalidArgument(
                f"{name} cannot be tried: it is the same for all candidates. Try {', '.join(TUNABLE)}."
            )
        raise unknown_name("setting", name, TUNABLE)
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise InvalidType(f"{name} in the grid must be a list of values to try, got {values!r}.")
    return values


def _typed(name: str, value: Any) -> Any:
    """The value in the setting's type, parsed if it is text from the command line."""
    if name.startswith(OF_CLIPPING):
        return value
    if name not in TUNABLE:
        raise unknown_name("setting", name, TUNABLE)
    hint = typing.get_type_hints(TrainingSettings)[name]
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType] or [hint]
    kind = kinds[0]
    if kind is bool:
        if str(value).lower() not in ("true", "false"):
            raise InvalidArgument(f"{name} is true or false, got {value!r}.")
        return str(value).lower() == "true"
    if kind is not str and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            raise InvalidArgument(f"{name}={value!r} is not a number: write for example {name}=1.") from None
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise InvalidType(f"{name} must be of type {kind.__name__}, got {value!r}.")
    return kind(value)


def _refuse_unusable(candidates: Sequence[TrainingSettings]) -> None:
    if len(set(candidates)) < len(candidates):
        raise InvalidArgument(
            "the grid has a candidate twice, which would be paid for twice: remove the repeated value."
        )
    for one in candidates:
        if not one.private:
            raise InvalidArgument(
                "clipping none trains without privacy and cannot be one of the candidates: remove it from the grid."
            )
