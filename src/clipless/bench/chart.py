"""Charts of a result: bars of the ratios, lines of the growth. Drawn where matplotlib is installed."""

import importlib.util
from pathlib import Path
from typing import Any

from clipless.bench.results import BenchResult
from clipless.bench.ways import OPACUS

SUFFIXES = (".svg", ".png")


def installed() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(result: BenchResult, folder: Path) -> list[Path]:
    """Write bench.svg and .png, and scaling.svg and .png when there are curves; the files, none without matplotlib."""
    if not installed():
        return []
    written = _save(_bars(result), folder / "bench")
    return written + (_save(_lines(result), folder / "scaling") if result.scaling else [])


def _bars(result: BenchResult) -> Any:
    """For each model a bar per way; the axis is logarithmic when another library is in, whose bars may be long."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    ways, models = result.ways(), list(result.models)
    figure = Figure(figsize=(4 + len(models), 4), layout="constrained")
    axes = figure.subplots()
    thickness = 0.8 / max(1, len(ways))
    for number, way in enumerate(ways):
        found = result.ratios(way)
        places = [models.index(name) + (number + 0.5) * thickness - 0.4 for name in found]
        bars = axes.bar(places, [each.ratio for each in found.values()], thickness, label=way)
        axes.bar_label(bars, fmt="%.2f", fontsize=6, rotation=90, padding=2)
    axes.axhline(1.0, color="black", linewidth=0.8)
    if any(way.startswith(OPACUS) for way in ways):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
        axes.tick_params(axis="y", which="minor", labelsize=6)
    axes.set_xticks(range(len(models)), models)
    axes.set(ylabel="time over plain training", title="One training step, ratio of minima")
    axes.margins(y=0.15)
    figure.legend(loc="outside lower center", fontsize=7, ncols=6)
    return figure


def _lines(result: BenchResult) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(result.scaling), 3.6), layout="constrained")
    for axes, curve in zip(
        figure.subplots(1, len(result.scaling), squeeze=False)[0], result.scaling.values(), strict=True
    ):
        axes.plot(curve.sizes, curve.plain_ms, "o-", label=f"plain, slope {curve.plain_slope:.2f}")
        axes.plot(curve.sizes, curve.private_ms, "o-", label=f"auto-s, slope {curve.private_slope:.2f}")
        axes.set(xscale="log", yscale="log", xlabel=curve.title, ylabel="ms per step")
        axes.set_xticks(curve.sizes, [str(size) for size in curve.sizes], fontsize=7)
        axes.minorticks_off()
        axes.xaxis.label.set_size(7)
        axes.legend(fontsize=7)
    return figure


def _save(figure: Any, stem: Path) -> list[Path]:
    """The same result gives the same SVG, byte for byte."""
    import matplotlib as mpl

    paths = [stem.with_suffix(suffix) for suffix in SUFFIXES]
    with mpl.rc_context({"svg.hashsalt": "clipless"}):
        for path in paths:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    return paths
