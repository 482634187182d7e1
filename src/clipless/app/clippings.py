"""Clippings as text, for the command line and configuration files: `dc-p(percentile=0.3, bins=30)`.

A name alone is that clipping with its defaults. `schedule(0.95 abadi, 0.05 global(cutoff=100))` changes within a run: shares
of the steps, each with a clipping.
"""

import ast
import inspect
import re
from collections.abc import Mapping
from typing import Any

from clipless.arguments import named, unknown_name
from clipless.clipping import CLIPPINGS, Clipping
from clipless.errors import InvalidArgument
from clipless.phases import Schedule, schedule

SCHEDULE = "schedule"
EXAMPLE = "write for example 'dc-p(percentile=0.3, bins=30)'"


def parse(text: str) -> Clipping | Schedule:
    """The clipping that a text describes. Raises InvalidArgument for an unknown name, parameter or value.

    >>> parse("dc-p(percentile=0.3, bins=30)").policy
    DCP(bins=30, start=1.0, histogram_multiplier=None, percentile=0.3)
    >>> parse("schedule(0.9 abadi, 0.1 global(cutoff=5))").edges(100)
    [0, 90, 100]
    """
    name, inside = _divided(text)
    if name == SCHEDULE:
        return schedule([_phase(part) for part in split(inside)])
    factory = named("clipping", name, CLIPPINGS)
    known = inspect.signature(factory).parameters
    given = _arguments(text, inside)
    for parameter in given:
        if parameter not in known:
            raise unknown_name(f"parameter of {name}", parameter, known)
    return factory(**given)


def parse_one(text: str, doing: str) -> Clipping:
    """The clipping that a text describes, if it is one. Raises InvalidArgument for a schedule, which cannot be `doing`."""
    how = parse(text)
    if isinstance(how, Schedule):
        raise InvalidArgument(f"a schedule has several clippings: {doing} one phase at a time.")
    return how


def parameters(name: str) -> Mapping[str, Any]:
    """The parameters of a clipping and their defaults, by which they are set and searched."""
    known = inspect.signature(named("clipping", name, CLIPPINGS)).parameters
    return {parameter: found.default for parameter, found in known.items()}


def with_parameter(text: str, parameter: str, value: str) -> str:
    """The text with one parameter set or replaced. Raises as `parse` does.

    >>> with_parameter("dc-p(bins=30)", "percentile", "0.3")
    'dc-p(bins=30, percentile=0.3)'
    """
    name, inside = _divided(text)
    if name == SCHEDULE:
        raise InvalidArgument(
            f"clipping.{parameter} of a schedule could be that of any phase: write the schedules out."
        )
    kept = [part for part in split(inside) if part.partition("=")[0].strip() != parameter]
    made = f"{name}({', '.join([*kept, f'{parameter}={value}'])})"
    parse(made)
    return made


def split(text: str) -> list[str]:
    """The parts between commas outside of brackets.

    >>> split("dc-p(percentile=0.3, bins=30), auto-s")
    ['dc-p(percentile=0.3, bins=30)', 'auto-s']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _divided(text: str) -> tuple[str, str]:
    found = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if found is None:
        raise InvalidArgument(f"{text!r} is not a clipping: {EXAMPLE}, or one of {', '.join(CLIPPINGS)}.")
    return found[1], found[2] or ""


def _arguments(text: str, inside: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for part in split(inside):
        parameter, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise InvalidArgument(f"{part!r} in {text!r} names no parameter: {EXAMPLE}.")
        if parameter in given:
            raise InvalidArgument(f"{parameter} is given twice in {text!r}: give it once.")
        given[parameter] = _value(value)
    return given


def _value(text: str) -> Any:
    """A number, a list of numbers, or a name."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _phase(part: str) -> tuple[float, Clipping]:
    share, _, rest = part.partition(" ")
    try:
        number = float(share)
    except ValueError:
        raise InvalidArgument(
            f"{part!r} is not a phase of a schedule: write a share of the steps and a clipping, as '0.95 abadi'."
        ) from None
    clipping = parse(rest)
    if isinstance(clipping, Schedule):
        raise InvalidArgument("a schedule within a schedule: list all phases in one.")
    return number, clipping
