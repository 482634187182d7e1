"""Options that several commands share, as dataclasses: one option for each field, declared once."""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from clipless.app.terminal import output

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes: the result only.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show where an error was raised.")]


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer takes it: a parameter whose type is a dataclass becomes an option for each of its fields, and
    --quiet and --debug are added, which every command has."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = [*_parameters(function, hints, groups), *_common()]

    @functools.wraps(function)
    def command(**values: Any) -> None:
        quiet, _ = values.pop("quiet"), values.pop("debug")  # main() looks for --debug itself
        for name, group in groups.items():
            values[name] = group(**{one.name: values.pop(one.name) for one in fields(group)})
        with output.quietly(quiet):
            function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _parameters(
    function: Callable[..., None], hints: dict[str, Any], groups: dict[str, Any]
) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in groups:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            continue
        group = groups[parameter.name]
        inner = get_type_hints(group, include_extras=True)
        for one in fields(group):
            yield _keyword(one.name, inner[one.name], one.default)


def _common() -> Iterator[inspect.Parameter]:
    yield _keyword("quiet", QuietOption, False)
    yield _keyword("debug", DebugOption, False)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
