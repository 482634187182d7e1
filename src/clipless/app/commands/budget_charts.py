"""The charts of `clipless budget --draw`."""

import json
from pathlib import Path
from typing import Any

from clipless.app.charts import Chart, drawing, figure, lines, save
from clipless.app.charts.budget import Budget, curves
from clipless.app.terminal.progress import progress_bar

STEM = "budget"


def draw_charts(budget: Budget, path: Path, *, visible: bool) -> dict[str, Any]:
    """Draw the charts of a budget, with a progress bar on stderr. Returns the data of the curves and the files written."""
    folder = path.suffix == ""
    if not folder:
        drawing.drawable(path)
    figure()  # raises before the work if matplotlib is missing
    found = _compute_curves(budget, visible)
    written = _one_each(found, path) if folder else [_all_in_one(found, path)]
    data = {name: drawing.plain(chart.to_dict()) for name, chart in found.items()}
    beside = path / f"{STEM}.json" if folder else path.with_suffix(".json")
    beside.write_text(json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    return {"curves": data, "drawn": [str(file) for file in (*written, beside)]}


def _compute_curves(budget: Budget, visible: bool) -> dict[str, Chart]:
    numbers = sum(budget.points().values())
    with progress_bar("{task.completed}/{task.total} numbers", visible=visible, on_terminal_only=True) as bar:
        task = bar.add_task("computing curves", total=numbers)
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
