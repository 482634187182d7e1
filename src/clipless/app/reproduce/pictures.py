"""Figures of an experiment: bars, curves over a setting, heat maps, thresholds, histograms of norms, reliability."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from textwrap import fill
from typing import Any

import numpy as np

from clipless.app.charts.drawing import COLOURS, HEIGHT, MARKERS, WIDTH
from clipless.app.reproduce.configuration import Configuration
from clipless.app.reproduce.drawing import curve, dress, panels
from clipless.app.reproduce.measures import THRESHOLDS
from clipless.app.reproduce.summary import FEWEST_SEEDS, TableLine, interval, metric_name, with_interval

INCHES_A_LINE = 0.42
CHARACTERS = 70
LEGEND_WIDTH = 72  # characters
MOST_PANELS = 6
NOTE = {"fontsize": 7, "color": "0.35"}
# A bin of a reliability diagram with fewer test records is not shown.
FEW = 20


def bars(experiment: Configuration, found: Sequence[TableLine], records: Sequence[Mapping[str, Any]]) -> Any:
    """A point with its interval for every line, the paper's beside it; in a second panel the calibration, if measured."""
    calibrated = all("ECE" in line.extra for line in found)
    figure, (axes, *others) = panels(2 if calibrated else 1)
    figure.set_size_inches(WIDTH * (1.6 if calibrated else 1.0), max(HEIGHT, INCHES_A_LINE * len(found) + 1))
    for beside in others:
        for number, line in enumerate(found):
            _point(beside, number, line.extra["ECE"])
        beside.set_yticks(range(len(found)), [""] * len(found))
        beside.set_ylim(len(found) - 0.5, -0.6)
        beside.set_xlim(left=0)
        dress(beside, "", "expected calibration error", "", legend=None)
    labels = [_label(line) for line in found]
    for number, line in enumerate(found):
        _point(axes, number, line.scores, _once("ours", number))
        text = with_interval(line.mean, line.interval)
        axes.annotate(text, (line.mean, number), xytext=(0, 7), textcoords="offset points", ha="center", **NOTE)
    theirs = [(number, line.published) for number, line in enumerate(found) if line.published]
    for count, (number, one) in enumerate(theirs):
        axes.errorbar(
            one.value,
            number + 0.22,
            xerr=one.interval,
            fmt="D",
            color=COLOURS[1],
            capsize=4,
            label=_once("paper", count),
        )
    axes.set_yticks(range(len(found)), labels)
    axes.set_ylim(len(found) - 0.5, -0.6)
    axes.margins(x=0.15)
    dress(axes, "", metric_name(found[0].metric), "", log=experiment.figure.get("log", ""), legend=None)
    figure.suptitle(fill(experiment.title, CHARACTERS), fontsize=10)
    if theirs:
        figure.legend(fontsize=8, frameon=False, loc="outside lower right", ncols=2)
    return figure


def _point(axes: Any, line: int, values: Sequence[float], label: str | None = None) -> None:
    """The mean of some runs, with its interval if they are not few, and every run."""
    half = interval(values) if len(values) >= FEWEST_SEEDS else None
    axes.errorbar(fmean(values), line, xerr=half, fmt="o", color=COLOURS[0], capsize=4, label=label)
    axes.plot(values, [line] * len(values), "|", color=COLOURS[0], alpha=0.5, markersize=7)


def curves(experiment: Configuration, found: Sequence[TableLine], records: Sequence[Mapping[str, Any]]) -> Any:
    """The metric against a setting of the grid, one curve with error bars, or with the runs if they are few, for every row
    and combination of the other settings; the paper's dotted. A row that has the setting by itself is a point."""
    key = experiment.figure["x"]
    figure, (axes,) = panels(1)
    fixed = {row.name: row.settings[key] for row in experiment.rows if key in row.settings}

    def place(line: TableLine) -> Any:
        return line.point.get(key, fixed.get(line.row))

    rows = list(dict.fromkeys(_without(key, line) for line in found if place(line) is not None))
    for number, row in enumerate(rows):
        own = sorted((line for line in found if place(line) is not None and _without(key, line) == row), key=place)
        again, colour = divmod(number, len(COLOURS))
        marker = MARKERS[(colour + again) % len(MARKERS)]  # another one where colours begin again
        style = {"color": COLOURS[colour], "marker": marker, "markersize": 4}
        x = [place(line) for line in own]
        half = [line.interval or 0.0 for line in own]
        for at, line in zip(x, own, strict=True):
            if 1 < len(line.scores) < FEWEST_SEEDS:
                axes.plot([at] * len(line.scores), line.scores, "_", color=COLOURS[colour], alpha=0.6)
        axes.errorbar(x, [line.mean for line in own], yerr=half, label=row, linewidth=1.5, capsize=3, **style)
        theirs = [(place(line), line.published.value) for line in own if line.published]
        if theirs:
            axes.plot(*zip(*theirs, strict=True), linestyle=":", alpha=0.6, **style)
    for line in found:
        if place(line) is None:
            axes.axhline(line.mean, color="0.4", linewidth=1, linestyle="--", label=f"{line.row} ({line.mean:.2f})")
    ending = " (dotted: the paper)" if any(line.published for line in found) else ""
    log = experiment.figure.get("log", "")
    dress(axes, experiment.title + ending, key, metric_name(found[0].metric), log, legend=None)
    longest = max(map(len, axes.get_legend_handles_labels()[1]))
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=max(1, min(4, LEGEND_WIDTH // longest)))
    places = sorted({place(line) for line in found} - {None})
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.set_xticks([], minor=True)
    return figure


def _without(key: str, line: TableLine) -> str:
    """The name of a line's curve: its row and the settings other than that of the axis."""
    return ", ".join([line.row, *(f"{value}" for name, value in line.point.items() if name != key)])


def heat(experiment: Configuration, found: Sequence[TableLine], records: Sequence[Mapping[str, Any]]) -> Any:
    """For every row a map of the metric over two settings of the grid, all in the same colours."""
    rows = list(dict.fromkeys(line.row for line in found))
    figure, all_axes = panels(min(len(rows), 3))
    low, high = min(line.mean for line in found), max(line.mean for line in found)
    image = None
    for axes, row in zip(all_axes, rows, strict=False):
        own = [line for line in found if line.row == row]
        keys = [
            key for key in (experiment.figure["x"], experiment.figure["y"]) if all(key in line.point for line in own)
        ]
        x, y = (sorted({line.point[key] for line in own}) for key in keys)
        table = np.full((len(y), len(x)), np.nan)
        for line in own:
            table[y.index(line.point[keys[1]]), x.index(line.point[keys[0]])] = line.mean
        image = axes.imshow(table, origin="lower", aspect="auto", cmap="viridis", vmin=low, vmax=high)
        for i, j in np.argwhere(np.isfinite(table)):
            dark = table[i, j] < (low + high) / 2
            axes.text(j, i, f"{table[i, j]:.1f}", ha="center", va="center", fontsize=7, color="w" if dark else "k")
        axes.set_xticks(range(len(x)), [f"{value:g}" for value in x])
        axes.set_yticks(range(len(y)), [f"{value:g}" for value in y])
        dress(axes, row, keys[0], keys[1], legend=None)
        axes.grid(visible=False)
    figure.colorbar(image, ax=all_axes, label=metric_name(found[0].metric))
    return figure


def thresholds(experiment: Configuration, found: Sequence[TableLine], records: Sequence[Mapping[str, Any]]) -> Any:
    """The released thresholds over training, first seed: a panel for every row, a curve for every run."""
    shown = [one for one in records if one["thresholds"] and one["settings"]["seed"] == 0]
    rows = list(dict.fromkeys(record["row"] for record in shown))
    figure, all_axes = panels(len(rows))
    for axes, row in zip(all_axes, rows, strict=True):
        for number, record in enumerate(one for one in shown if one["row"] == row):
            steps = np.linspace(1, record["steps"], len(record["thresholds"]))
            settings = {**record["point"], **record.get("candidate", {})}
            label = ", ".join(f"{key.removeprefix('clipping.')} {value}" for key, value in settings.items())
            curve(axes, number, steps, record["thresholds"], label)
        dress(axes, f"{row}: released thresholds", "step", "threshold", "y", legend=None)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return figure


def norms(experiment: Configuration, found: Sequence[TableLine], records: Sequence[Mapping[str, Any]]) -> Any:
    """Quantiles of the per-sample norms over training, and the threshold; one panel for every run of the first seed."""
    shown = _with_norms(records)
    figure, all_axes = panels(len(shown))
    for axes, record in zip(all_axes, shown, strict=True):
        looks = record["extra"]["norms"]
        steps = [look["step"] for look in looks]
        low, lower, middle, upper, high = zip(*(look["quantiles"] for look in looks), strict=True)
        axes.fill_between(steps, low, high, color=COLOURS[5], alpha=0.3, label="5 to 95 %")
        axes.fill_between(steps, lower, upper, color=COLOURS[0], alpha=0.35, label="25 to 75 %")
        curve(axes, 0, steps, middle, "median norm")
        curve(axes, 1, steps, [look["threshold"] for look in looks], "threshold", linestyle="--")
        share = 100 * looks[-1]["above"]
        dress(axes, f"{record['row']}: {share:.0f} % above at the end", "step", "norm (not private)", "y")
    return figure


def errors(experiment: Configuration, found: Sequence[TableLine], records: Sequence[Mapping[str, Any]]) -> Any:
    """E(C), noise and what clipping cuts off, against C at the first, a middle and the last look of a run of the first seed;
    a dot where the run's own threshold was.
    """
    shown = [one for one in _with_norms(records) if one["private"]]
    figure, all_axes = panels(len(shown))
    for axes, record in zip(all_axes, shown, strict=True):
        looks = record["extra"]["norms"]
        for number, look in enumerate((looks[0], looks[len(looks) // 2], looks[-1])):
            error = record["noise_cost"] * THRESHOLDS**2 + np.array(look["cut"])
            best = THRESHOLDS[error.argmin()]
            curve(axes, number, THRESHOLDS, error, f"step {look['step']}: least at {best:.2g}")
            at = np.interp(np.log(look["threshold"]), np.log(THRESHOLDS), error)
            axes.plot(look["threshold"], at, MARKERS[0], color=COLOURS[number])
        dress(axes, record["row"], "threshold C (dot: in use)", "E(C) (not private)", "xy")
    return figure


def shares(experiment: Configuration, found: Sequence[TableLine], records: Sequence[Mapping[str, Any]]) -> Any:
    """The share of records above the threshold, and their median norm, over training; a curve for every run of the first
    seed."""
    figure, (left, right) = panels(2)
    for number, record in enumerate(_with_norms(records)):
        looks = record["extra"]["norms"]
        steps = [look["step"] for look in looks]
        label = ", ".join([record["row"], *map(str, record["point"].values())])
        curve(left, number, steps, [100 * look["above"] for look in looks], label)
        curve(right, number, steps, [look["quantiles"][2] for look in looks], label)
    dress(left, "records above the threshold", "step", "share in % (not private)")
    dress(right, "median norm of single records", "step", "norm (not private)", "y", legend=None)
    return figure


def _with_norms(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Runs of the first seed that were looked at, at most as many as there are panels for."""
    return [one for one in records if "norms" in (one.get("extra") or {}) and one["settings"]["seed"] == 0][
        :MOST_PANELS
    ]


def reliability(experiment: Configuration, found: Sequence[TableLine], records: Sequence[Mapping[str, Any]]) -> Any:
    """Accuracy against confidence, and the probability of the true class, of all seeds together. Bins of fewer than `FEW`
    test records say little and are left out."""
    figure, (left, right) = panels(2)
    left.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    measured = [one for one in records if "reliability" in (one.get("extra") or {})]
    for number, row in enumerate(dict.fromkeys(record["row"] for record in measured)):
        seeds = [record["extra"] for record in measured if record["row"] == row]
        bins = [one["reliability"] for one in seeds]
        counts = np.array([one["counts"] for one in bins])
        full = counts.sum(0) >= FEW
        x, y = (
            (np.array([[value or 0.0 for value in one[name]] for one in bins]) * counts).sum(0)[full]
            / counts.sum(0)[full]
            for name in ("confidence", "accuracy")
        )
        label = f"{row}: ECE {np.mean([one['ECE'] for one in seeds]):.3f}"
        curve(left, number, x, y, label, marker=MARKERS[number % len(MARKERS)], markersize=3)
        shares = np.sum([one["true_class"] for one in bins], 0)
        edges = np.linspace(0, 1, len(shares) + 1)
        right.stairs(shares / shares.sum(), edges, color=COLOURS[number % len(COLOURS)], label=row)
    dress(left, "reliability on test records", "confidence", "accuracy")
    dress(right, "probability given to the true class", "probability", "share of test records", "y")
    return figure


def _label(line: TableLine) -> str:
    return ", ".join([line.row, *(f"{key} {value}" for key, value in line.point.items())])


def _once(label: str, number: int) -> str | None:
    return label if number == 0 else None


Picture = Callable[[Configuration, Sequence[TableLine], Sequence[Mapping[str, Any]]], Any]
PICTURES: dict[str, Picture] = {"bars": bars, "curves": curves, "heat": heat, "thresholds": thresholds}
PICTURES |= {"norms": norms, "errors": errors, "shares": shares, "reliability": reliability}
