"""Configuration files: options in TOML, over which those of the command line win, and the effective ones of a run."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from clipless.app.cli._data_options import SCHEMA_KEYS, DataGroup, checked_columns, read_toml
from clipless.app.data import OwnData
from clipless.app.toml_text import toml_text
from clipless.app.training import TrainingSettings
from clipless.arguments import unknown_name
from clipless.errors import InvalidArgument

NOT_IN_FILES = (
    "config",
    "help",
    "resume",
    "reseed",
    "as_json",
    "quiet",
    "debug",
    "install_completion",
    "show_completion",
)
COLUMNS = "clipless.columns"
HEADER = (
    "# The effective configuration of a run; repeat it with:  clipless train --config config.toml\n"
    "# Paths are relative to the folder in which it was started. No key and no seed is ever written here.\n"
)


def read_config(context: typer.Context, value: Path | None) -> Path | None:
    """The callback of --config: what the file says are the defaults of this command. Raises InvalidArgument for a key that
    is no option of it, with the nearest one."""
    if value is None or context.resilient_parsing:
        return value
    content = read_toml(value, "configuration")
    options = _options(context)
    context.meta[COLUMNS] = {name: content.pop(name) for name in SCHEMA_KEYS if name in content}
    checked_columns(context.meta[COLUMNS].get("columns", {}), value)
    given: dict[str, Any] = {}
    for key, one in content.items():
        found = options.get(key.replace("-", "_"))
        if found is None and key in NOT_IN_FILES:
            raise InvalidArgument(f"{key} is given on the command line only: remove it from {value}.")
        if found is None:
            raise unknown_name(f"option in {value}", key, [*options, "columns"])
        given[str(found.name)] = _as_typed(key, one, value, several=found.multiple)
    context.default_map = {**(context.default_map or {}), **given}
    return value


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        callback=read_config,
        is_eager=True,
        help="TOML file with options of this command, and tables [columns.NAME]. Options given here win.",
    ),
]


def config_columns(context: typer.Context) -> dict[str, Any]:
    """`columns` and `made_from` of the configuration file, as `DataGroup.own` takes them."""
    return dict(context.meta.get(COLUMNS, {}))


def config_text(data: DataGroup, own: OwnData, settings: TrainingSettings) -> str:
    """The effective configuration. A seed is left out: whoever knows it can subtract the noise."""
    shown = {name: value for name, value in asdict(data).items() if name != "schema" and value not in (None, [], ())}
    chosen = {name: value for name, value in asdict(settings).items() if name not in ("seed", "test_every")}
    if settings.noise_multiplier is not None:
        del chosen["epsilon"]
    if not chosen["unit_gradients"]:
        del chosen["unit_gradients"]
    rules = {"made_from": own.made_from, "columns": dict(own.columns)} if own.columns else {}
    return HEADER + toml_text({**shown, **chosen, **rules})


def _options(context: typer.Context) -> dict[str, Any]:
    """From the name of an option in a file to its parameter."""
    return {
        option.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        if parameter.name not in NOT_IN_FILES
        for option in parameter.opts
        if option.startswith("--")
    }


def _as_typed(key: str, value: Any, path: Path, *, several: bool) -> Any:
    """The value as on the command line: texts, lists of texts, and flags."""
    if isinstance(value, Mapping):
        raise InvalidArgument(f"[{key}] in {path} is a table, and {key} is an option: write {key} = value.")
    if several:
        return [str(one) for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        if key != "classes":
            raise InvalidArgument(f"{key} in {path} is a list, and {key} takes one value: write {key} = value.")
        return ",".join(map(str, value))
    return value if isinstance(value, bool) else str(value)
