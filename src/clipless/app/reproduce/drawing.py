"""What the figures of `clipless reproduce` share: axes, curves, and a figure with the sentence that goes with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from clipless.app.charts.drawing import COLOURS, figure

DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)))


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn: the name of its file, its source, one sentence on what it shows."""

    stem: str
    source: str
    sentence: str
    draw: Callable[[], Any]


def panels(number: int) -> tuple[Any, list[Any]]:
    """A figure with this many panels, smaller ones where there are several side by side."""
    made, axes = figure(number)
    rows, columns = axes[0].get_gridspec().get_geometry()
    made.set_size_inches({1: 6.0, 2: 10.5}.get(columns, 4.5 * columns), 4.0 * rows)
    return made, axes


def curve(axes: Any, number: int, x: npt.ArrayLike, y: npt.ArrayLike, label: str = "", **style: Any) -> None:
    """The curve of that number in a panel: colours and dashes tell curves apart, in black and white too."""
    again, colour = divmod(number, len(COLOURS))
    dashes = DASHES[(number + again) % len(DASHES)]  # other ones where colours begin again
    shown = {"color": COLOURS[colour], "linestyle": dashes, "linewidth": 1.6}
    axes.plot(x, y, label=label or None, **(shown | style))


def dress(axes: Any, title: str, x: str, y: str, log: str = "", legend: str | None = "best") -> None:
    """Titles, grid and legend of a panel; `log` names the axes that are logarithmic: "x", "y" or "xy"."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    axes.tick_params(which="both", labelsize=8)
    axes.grid(True, which="major", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc=legend)
