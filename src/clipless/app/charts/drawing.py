"""Charts for screen and print: `figure`, `lines`, `bars`, `save`. matplotlib is imported when the first one is drawn.

Colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart; markers and dashes do so in
black and white.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from clipless.errors import InvalidArgument, MissingLibrary

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
SUFFIXES = (".svg", ".png", ".pdf")
WIDTH, HEIGHT = 6.0, 4.0
MOST_COLUMNS = 3


@dataclass(frozen=True)
class Line:
    """One curve. An `approximate` one is dashed; its label should say why."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    approximate: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves on the same axes, and optionally a marked point and a marked level, each with its label."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False
    point: tuple[float, float, str] | None = None
    level: tuple[float, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for files."""
        return asdict(self)

    def finite(self) -> "Chart":
        """The chart without points that the axes cannot show."""
        kept = []
        for line in self.lines:
            shown = [
                (x, y) for x, y in zip(line.x, line.y, strict=True) if abs(y) < 1e300 and not (self.log_y and y <= 0)
            ]
            kept.append(replace(line, x=tuple(x for x, _ in shown), y=tuple(y for _, y in shown)))
        return replace(self, lines=tuple(kept))


def figure(number: int = 1) -> tuple[Any, list[Any]]:
    """A figure with this many charts, at most three side by side so that they are legible on a laptop, and their axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingLibrary("drawing needs matplotlib: pip install 'clipless[figures]'.") from None
    rows = math.ceil(number / MOST_COLUMNS)
    columns = math.ceil(number / rows)
    made = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
    axes = list(made.subplots(rows, columns, squeeze=False).flat)
    for beyond in axes[number:]:
        beyond.remove()
    return made, axes[:number]


def lines(axes: Any, chart: Chart) -> None:
    """Draw the curves of a chart."""
    for number, line in enumerate(chart.finite().lines):
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        dashes = "--" if line.approximate else "-"
        axes.plot(line.x, line.y, linestyle=dashes, linewidth=1.5, markersize=4, label=line.label, **style)
    if chart.level is not None:
        axes.axhline(chart.level[0], color="black", linestyle=":", linewidth=1.2, label=chart.level[1])
    if chart.point is not None:
        x, y, label = chart.point
        axes.plot([x], [y], marker="*", markersize=13, linestyle="none", color="black", zorder=5, label=label)
    _axes(axes, chart.title, chart.x_label, chart.y_label)
    _scale(axes.set_xscale, axes.xaxis, chart.log_x, {x for line in chart.lines for x in line.x})
    _scale(axes.set_yscale, axes.yaxis, chart.log_y, set())


def bars(
    axes: Any, title: str, y_label: str, groups: Sequence[str], values: Mapping[str, Sequence[float | None]]
) -> None:
    """For each group a bar of every series in `values`; None leaves a gap. Bars are labelled with their value."""
    thickness = 0.8 / max(1, len(values))
    for number, (label, heights) in enumerate(values.items()):
        found = [(place, height) for place, height in enumerate(heights) if height is not None]
        places = [place + (number + 0.5) * thickness - 0.4 for place, _ in found]
        drawn = axes.bar(
            places, [height for _, height in found], thickness, label=label, color=COLOURS[number % len(COLOURS)]
        )
        axes.bar_label(drawn, fmt="%.3g", fontsize=7, padding=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.12)
    _axes(axes, title, "", y_label)


def save(figure: Any, path: Path | str) -> Path:
    """Write a figure as .svg, .png or .pdf; the same figure gives the same SVG, byte for byte."""
    import matplotlib as mpl

    target = drawable(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "clipless"}):
        figure.savefig(target, dpi=150, metadata=None if target.suffix == ".png" else {_DATED[target.suffix]: None})
    return target


def drawable(path: Path | str) -> Path:
    """The path, if its suffix is that of a picture. Raises InvalidArgument otherwise."""
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise InvalidArgument(f"cannot draw {target.name!r}: end its name in {', '.join(SUFFIXES)}.")
    return target


_DATED = {".svg": "Date", ".pdf": "CreationDate"}


def _axes(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(True, which="major", color="0.88", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)


def _scale(set_scale: Any, axis: Any, logarithmic: bool, ticks: set[float]) -> None:
    """Plain numbers on the axis; on a logarithmic one at the points themselves if they are few, else at 1, 2 and 5."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    if logarithmic:
        set_scale("log")
        few = 0 < len(ticks) <= 10
        axis.set_major_locator(FixedLocator(sorted(ticks)) if few else LogLocator(subs=(1.0, 2.0, 5.0), numticks=30))
        axis.set_minor_formatter(NullFormatter())
        if few:
            axis.set_minor_locator(FixedLocator([]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def number(value: float) -> str:
    """A number for an axis or a title.

    >>> number(0.2), number(12000.0), number(1e7), number(1e-05)
    ('0.2', '12,000', '1e7', '1e-5')
    """
    if 1e3 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.6g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def plain(value: Any) -> Any:
    """Lists for tuples, and "inf" for infinity, which JSON does not have.

    >>> plain({"y": (1.0, math.inf)})
    {'y': [1.0, 'inf']}
    """
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return "inf" if value == math.inf else value
