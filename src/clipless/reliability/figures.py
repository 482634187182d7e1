"""Reliability diagrams and histograms, of one run or of several. matplotlib is loaded when the first one is drawn.

Every figure says at its foot which records it was drawn from.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clipless.arguments import named, whole
from clipless.arrays import Floats
from clipless.errors import InvalidArgument, MissingLibrary
from clipless.reliability.checks import Labels, checked
from clipless.reliability.metrics import confidence_and_correctness, sorted_into, true_class_probability
from clipless.reliability.reporting import ORIGINS

Runs = Mapping[str, tuple[Any, Any]]
# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
SUFFIXES = (".svg", ".png", ".pdf")


def diagram(
    probabilities: Any,
    labels: Any,
    path: Path | str | None = None,
    bins: int = 15,
    adaptive: bool = False,
    records: str = "test",
    title: str = "Reliability",
) -> Any:
    """The reliability diagram of one run: accuracy against confidence in bars, and how many records each bar holds."""
    table, found = checked(probabilities, labels)
    sorted_bins = sorted_into(*confidence_and_correctness(table, found), whole("bins", bins), adaptive)
    figure, (above, below) = _figure(2, (5.2, 5.6), height_ratios=[3, 1], sharex=True)
    left, width, full = sorted_bins.edges[:-1], np.diff(sorted_bins.edges), sorted_bins.counts > 0
    bars = {"x": left[full], "width": width[full], "align": "edge", "edgecolor": "white", "linewidth": 0.5}
    above.bar(height=sorted_bins.accuracy[full], color=COLOURS[0], label="accuracy", **bars)
    gap = (sorted_bins.confidence - sorted_bins.accuracy)[full]
    above.bar(height=gap, bottom=sorted_bins.accuracy[full], color=COLOURS[1], alpha=0.35, label="gap", **bars)
    _diagonal(above)
    _labelled(above, f"{title}: ECE {sorted_bins.ece():.3f}, MCE {sorted_bins.mce():.3f}", "", "accuracy")
    below.bar(height=sorted_bins.counts[full] / len(found), color="0.5", **bars)
    _labelled(below, "", "confidence", "share")
    return _finish(figure, path, records, {"": (table, found)})


def compare(
    runs: Runs, path: Path | str | None = None, bins: int = 15, adaptive: bool = False, records: str = "test"
) -> Any:
    """Several runs, `{name: (probabilities, labels)}`, side by side in three panels.

    Accuracy against confidence with ECE in the legend and bars of one standard error; the histogram of confidence; the
    histogram of the probability of the true class. Returns matplotlib's figure, written to `path` if there is one.
    """
    if not runs:
        raise InvalidArgument("there is no run to draw: give {name: (probabilities, labels)}.")
    judged = {name: checked(*run) for name, run in runs.items()}
    whole("bins", bins)
    figure, (curve, confident, true) = _figure(1, (13.5, 4.2), columns=3)
    grid = np.linspace(0, 1, bins + 1)
    for number, (name, (table, labels)) in enumerate(judged.items()):
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.5}
        confidence, correct = confidence_and_correctness(table, labels)
        found = sorted_into(confidence, correct, bins, adaptive)
        full = found.counts > 0
        error = np.sqrt(found.accuracy[full] * (1 - found.accuracy[full]) / found.counts[full])
        label = f"{name}: ECE {found.ece():.3f}, accuracy {correct.mean():.3f}"
        marks = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4, "elinewidth": 0.8, "capsize": 2}
        curve.errorbar(found.confidence[full], found.accuracy[full], error, label=label, **marks, **style)
        share = np.full(len(labels), 1 / len(labels))
        dashes = ("-", "--", "-.", ":")[number % 4]
        for axes, values in ((confident, confidence), (true, true_class_probability(table, labels))):
            axes.hist(values, grid, weights=share, histtype="step", label=name, linestyle=dashes, **style)
    _diagonal(curve)
    _labelled(curve, "Reliability", "confidence", "accuracy")
    _labelled(confident, "Confidence", "probability of the predicted class", "share of records", "upper center")
    _labelled(
        true, "Probability of the true class", "probability of the true class", "share of records", "upper center"
    )
    return _finish(figure, path, records, judged)


def _figure(rows: int, size: tuple[float, float], columns: int = 1, **options: Any) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingLibrary("drawing needs matplotlib: pip install 'clipless[figures]'.") from None
    made = Figure(figsize=size, layout="constrained")
    return made, made.subplots(rows, columns, **options)


def _diagonal(axes: Any) -> None:
    axes.plot([0, 1], [0, 1], color="0.4", linestyle=":", linewidth=1.2, label="perfectly calibrated")
    axes.set(xlim=(0, 1), ylim=(0, 1))


def _labelled(axes: Any, title: str, x: str, y: str, legend: str = "upper left") -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc=legend)


def _finish(figure: Any, path: Path | str | None, records: str, runs: Mapping[str, tuple[Floats, Labels]]) -> Any:
    counts = sorted({len(labels) for _, labels in runs.values()})
    sizes = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    origin = named("kind of records", records, ORIGINS).format(count=sizes)
    figure.supxlabel(f"Computed {origin}.", fontsize=8, color="black" if records == "test" else COLOURS[1])
    if path is not None:
        target = Path(path)
        if target.suffix not in SUFFIXES:
            raise InvalidArgument(f"cannot draw {target.name!r}: end its name in {', '.join(SUFFIXES)}.")
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
    return figure
