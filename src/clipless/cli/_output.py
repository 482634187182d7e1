"""What the commands show: results on stdout, everything else on stderr."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from decimal import ROUND_CEILING, Decimal
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from clipless.training import APPROXIMATION
from clipless.training import Progress as TrainingProgress

GDP_NOTE = APPROXIMATION


def show_json(record: Mapping[str, Any]) -> None:
    """One JSON object on stdout and nothing else; JSON has no infinity, so an infinite epsilon becomes "inf"."""
    finite = {key: str(value) if value == math.inf else value for key, value in record.items()}
    typer.echo(json.dumps(finite, indent=2, allow_nan=False))


def show_table(title: str, rows: Mapping[str, str]) -> None:
    table = Table("", Column(overflow="fold"), title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    Console().print(table)


def show_note(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text(message, style="yellow"))


def show_error(error: Exception) -> None:
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("Error: ", "bold red"), (str(error), "red")))


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def short(value: float | None) -> str:
    """A number for people: four significant digits, a dash for none. Rounded up, so that no epsilon is understated.

    >>> short(2.99312), short(0.000336), short(1160), short(None)
    ('2.994', '0.000336', '1160', '-')
    """
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exact = Decimal(repr(float(value)))
    rounded = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 3), rounding=ROUND_CEILING)
    return f"{float(rounded):.6g}"


class TrainingBar:
    """A bar on stderr with time left, epsilon spent, the threshold and test accuracy, from the first report on."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def __call__(self, progress: TrainingProgress) -> None:
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("training", total=progress.steps, epsilon="-", accuracy="-", threshold="-")
        self._bar.update(
            self._task,
            completed=progress.step,
            epsilon=short(progress.epsilon),
            accuracy=percent(progress.accuracy),
            threshold=short(progress.threshold),
        )


@contextmanager
def training_bar(title: str, *, visible: bool) -> Iterator[TrainingBar]:
    """A live bar while the block runs; nothing at all when it is not visible."""
    columns = (
        TextColumn(title, markup=False),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps"),
        TextColumn("ε {task.fields[epsilon]}"),
        TextColumn("R {task.fields[threshold]}"),
        TextColumn("test {task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), disable=not visible)
    try:
        yield TrainingBar(bar)
    finally:
        if bar.tasks:
            bar.stop()
