"""The charts of `clipless budget --draw`."""

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from clipless.report import Chart, charts, figure, lines, save
from clipless.report.budget import Budget, curves

STEM = "budget"


def drawn(budget: Budget, path: Path, *, visible: bool) -> dict[str, Any]:
    """Draw the charts of a budget with a bar on stderr; the data of the curves, and the files that were written."""
    folder = path.suffix == ""
    if not folder:
        charts.drawable(path)
    figure()  # refuses before the work if nothing can be drawn
    found = _computed(budget, visible)
    written = _one_each(found, path) if folder else [_all_in_one(found, path)]
    data = {name: plain(chart.to_dict()) for name, chart in found.items()}
    beside = path / f"{STEM}.json" if folder else path.with_suffix(".json")
    beside.write_text(json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    return {"curves": data, "drawn": [str(file) for file in (*written, beside)]}


def _computed(budget: Budget, visible: bool) -> dict[str, Chart]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} numbers"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (visible and console.is_terminal)) as bar:
        task = bar.add_task("computing curves", total=sum(budget.points().values()))
        return curves(budget, lambda: bar.advance(task))


def _one_each(found: dict[str, Chart], folder: Path) -> list[Path]:
    written = []
    for name, chart in found.items():
        picture, (axes,) = figure()
        lines(axes, chart)
        written.append(save(picture, folder / f"{STEM}-{name}.svg"))
    return written


def _all_in_one(found: dict[str, Chart], path: Path) -> Path:
    picture, axes = figure(len(found))
    for place, chart in zip(axes, found.values(), strict=True):
        lines(place, chart)
    return save(picture, path)


def plain(value: Any) -> Any:
    """Lists for tuples, and "inf" for infinity, which JSON has not.

    >>> plain({"y": (1.0, math.inf)})
    {'y': [1.0, 'inf']}
    """
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return "inf" if value == math.inf else value
