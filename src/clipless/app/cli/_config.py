"""Configuration files: options in TOML. Those on the command line win."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from clipless.app.options.training import DEFAULTS
from clipless.app.settings import TrainingSettings
from clipless.app.toml_files import SCHEMA_KEYS, checked_columns, read_toml
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
COLUMNS, GRID = "clipless.columns", "clipless.grid"
OF_RUNS = {field.name for field in fields(TrainingSettings)} - {"test_every"}  # the one that is not an option


def reading(
    *, grid: bool = False, skipped: Collection[str] = ()
) -> Callable[[typer.Context, Path | None], Path | None]:
    """The callback of --config: what the file says becomes the defaults of the command.

    With `grid` the file may have a table of that name. `skipped` are options of `train` that make no difference to this
    command. Others that it does not have are accepted at their defaults, so that the config.toml of a run can be used, and
    refused otherwise. Raises InvalidArgument for those and for unknown keys, with the nearest option.
    """

    def read(context: typer.Context, value: Path | None) -> Path | None:
        if value is None or context.resilient_parsing:
            return value
        content = read_toml(value, "configuration")
        options = _options(context)
        context.meta[COLUMNS] = {name: content.pop(name) for name in SCHEMA_KEYS if name in content}
        checked_columns(context.meta[COLUMNS].get("columns", {}), value)
        if grid and isinstance(content.get("grid"), Mapping):
            context.meta[GRID] = content.pop("grid")
        given: dict[str, Any] = {}
        for key, one in content.items():
            name = key.replace("-", "_")
            if name in options:
                given[str(options[name].name)] = _as_typed(key, one, value, several=options[name].multiple)
            elif name not in skipped:
                _refuse_unless_default(context, name, one, value, options)
        context.default_map = {**(context.default_map or {}), **given}
        return value

    return read


# Brackets are escaped: rich would take them for markup.
HELP = "TOML file with options of this command, and tables \\[columns.NAME]. Options given here win."

ConfigOption = Annotated[Path | None, typer.Option(callback=reading(), is_eager=True, help=HELP)]
GridConfigOption = Annotated[
    Path | None,
    typer.Option(
        callback=reading(grid=True),
        is_eager=True,
        help="TOML file with options of this command, a table \\[grid] of lists to try, and tables \\[columns.NAME]. "
        "Options given here win.",
    ),
]
CheckConfigOption = Annotated[
    Path | None,
    typer.Option(
        callback=reading(skipped=OF_RUNS),
        is_eager=True,
        help="TOML file, such as a run's config.toml, of which data, model, loss and clipping are used. Options given here "
        "win.",
    ),
]


def config_columns(context: typer.Context) -> dict[str, Any]:
    """`columns` and `made_from` of the configuration file, as `load_data` takes them."""
    return dict(context.meta.get(COLUMNS, {}))


def config_grid(context: typer.Context) -> dict[str, Any]:
    """The table `grid` of the configuration file."""
    return dict(context.meta.get(GRID, {}))


def given_options(context: typer.Context) -> frozenset[str]:
    """The options that were given, on the command line or in the configuration file."""
    return frozenset(name for name in context.params if _source(context, name) in ("COMMANDLINE", "DEFAULT_MAP"))


def chosen_multiplier(context: typer.Context, given: float | None) -> float | None:
    """The noise multiplier, unless an epsilon on the command line wins over that of the configuration file."""
    budget, noise = _source(context, "epsilon"), _source(context, "noise_multiplier")
    if given is None or (budget, noise) == ("COMMANDLINE", "DEFAULT_MAP"):
        return None
    if budget == noise:
        raise InvalidArgument("--epsilon and --noise-multiplier contradict each other: give one of them.")
    return given


def _source(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    return source.name if source else ""


def _options(context: typer.Context) -> dict[str, Any]:
    """From the name of an option in a file to its parameter."""
    return {
        option.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        if parameter.name not in NOT_IN_FILES
        for option in parameter.opts
        if option.startswith("--")
    }


def _refuse_unless_default(
    context: typer.Context, name: str, value: object, path: Path, options: Mapping[str, Any]
) -> None:
    if name in NOT_IN_FILES:
        raise InvalidArgument(f"{name} is given on the command line only: remove it from {path}.")
    if name not in OF_RUNS:
        raise unknown_name(f"option in {path}", name, [*options, "columns"])
    if value != getattr(DEFAULTS, name):
        raise InvalidArgument(
            f"{name} in {path} is an option of clipless train that {context.command.name} does not have: remove it."
        )


def _as_typed(key: str, value: Any, path: Path, *, several: bool) -> Any:
    """The value as on the command line: texts, lists of texts, and flags."""
    if isinstance(value, Mapping):
        raise InvalidArgument(f"[{key}] in {path} is a table, and {key} is an option: write {key} = value.")
    if several:
        return [str(one) for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        if key not in ("classes", "clippings", "games"):
            raise InvalidArgument(f"{key} in {path} is a list, and {key} takes one value: write {key} = value.")
        return ",".join(map(str, value))
    return value if isinstance(value, bool) else str(value)
