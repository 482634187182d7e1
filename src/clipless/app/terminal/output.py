"""Output of the commands: results on stdout, everything else on stderr."""

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import typer
from rich import console
from rich.table import Column, Table
from rich.text import Text

from clipless.rounding import rounded_up


class Console(console.Console):
    """A console that says when nobody reads it any more: rich's own ends the program, and with it a run."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def quietly(wanted: bool) -> Iterator[None]:
    """Show no notes and no progress inside the block, if wanted."""
    token = _quiet.set(wanted)
    try:
        yield
    finally:
        _quiet.reset(token)


def is_quiet() -> bool:
    return _quiet.get()


def show_json(record: Mapping[str, Any]) -> None:
    """One JSON object on stdout and nothing else; JSON has no infinity, so an infinite epsilon becomes "inf"."""
    finite = {key: str(value) if value == math.inf else value for key, value in record.items()}
    typer.echo(json.dumps(finite, indent=2, allow_nan=False))


def show_table(title: str, rows: Mapping[str, str]) -> None:
    table = Table("", Column(overflow="fold"), title=Text(title), show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    Console().print(table)


def show_note(message: str) -> None:
    """Something the user should know besides the result; not shown with --quiet."""
    if not is_quiet():
        show_warning(message)


def show_warning(message: str) -> None:
    """Something the user has to know, with or without --quiet."""
    Console(stderr=True, soft_wrap=True).print(Text(message, style="yellow"))


def show_error(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("Error: ", "bold red"), (message, "red")))


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.2%}"


def metric_text(metric: str, value: float | None) -> str:
    """A metric's value for a reader: accuracies in percent, anything else as a number."""
    if value is None or metric.endswith("accuracy"):
        return percent(value)
    return f"{value:.4g}"


def short(value: float | None) -> str:
    """A number rounded up to four digits; a dash for None."""
    return "-" if value is None else rounded_up(value)
