"""Charts of a result: bars of the ratios, lines of the growth. Drawn where matplotlib is installed."""

import importlib.util
from pathlib import Path
from typing import Any

from clipless.app.bench.results import BenchResult
from clipless.app.bench.store import suffix
from clipless.app.bench.ways import OPACUS
from clipless.app.charts import figure, save

SUFFIXES = (".svg", ".png")


def installed() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(result: BenchResult, folder: Path) -> list[Path]:
    """Write bench.svg and .png, and scaling.svg and .png if there are curves, with the suffix of the result's own file.
    Returns the files; none without matplotlib."""
    if not installed():
        return []
    ending = suffix(result.machine.get("allocator", {}))
    written = _save(_bars(result), folder / f"bench{ending}")
    return written + (_save(_lines(result), folder / f"scaling{ending}") if result.scaling else [])


def _bars(result: BenchResult) -> Any:
    """For each model a bar per way; with Opacus, whose bars may be long, the axis is logarithmic."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ways, models = result.ways(), list(result.models)
    made, (axes,) = figure()
    made.set_size_inches(4 + len(models), 4)
    thickness = 0.8 / max(1, len(ways))
    for number, way in enumerate(ways):
        found = result.ratios(way)
        places = [models.index(name) + (number + 0.5) * thickness - 0.4 for name in found]
        bars = axes.bar(places, [each.ratio for each in found.values()], thickness, label=way)
        axes.bar_label(bars, fmt="%.2f", fontsize=6, rotation=90, padding=2)
    axes.axhline(1.0, color="black", linewidth=0.8)
    if any(way.startswith(OPACUS) for way in ways):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(range(len(models)), models)
    axes.set(ylabel="time over plain training", title="One training step, ratio of minima")
    axes.margins(y=0.15)
    made.legend(loc="outside lower center", fontsize=7, ncols=6)
    return made


def _lines(result: BenchResult) -> Any:
    made, all_axes = figure(len(result.scaling))
    for axes, curve in zip(all_axes, result.scaling.values(), strict=True):
        axes.plot(curve.sizes, curve.plain_ms, "o-", label=f"plain, slope {curve.plain_slope:.2f}")
        axes.plot(curve.sizes, curve.private_ms, "o-", label=f"auto-s, slope {curve.private_slope:.2f}")
        axes.set(xscale="log", yscale="log", xlabel=curve.title, ylabel="ms per step")
        axes.set_xticks(curve.sizes, [_short(size) for size in curve.sizes], fontsize=7)
        axes.minorticks_off()
        axes.xaxis.label.set_size(7)
        axes.legend(fontsize=7)
    return made


def _short(size: int) -> str:
    """
    >>> _short(512), _short(10**8)
    ('512', '1e8')
    """
    return f"{size:.0e}".replace("e+0", "e") if size >= 10**4 else str(size)


def _save(figure: Any, stem: Path) -> list[Path]:
    return [save(figure, stem.with_suffix(suffix)) for suffix in SUFFIXES]
