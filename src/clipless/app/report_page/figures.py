"""The figures of a report: scores, thresholds, released histograms, reliability. Each says whether it is private."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clipless.app.charts.drawing import Chart, Line
from clipless.app.report import RunReport
from clipless.app.report_page.facts import seeded
from clipless.app.report_page.svg import SERIES, series_class, svg
from clipless.app.report_page.values import NOT_PRIVATE, TEST_RECORDS

MOST_POINTS = 400
KNOWN_NOISE = "from a run whose noise can be subtracted by anyone who knows the seed"


@dataclass(frozen=True)
class Figure:
    """A chart as SVG, the class and label of each curve, and the mark it carries."""

    title: str
    drawing: str
    legend: tuple[tuple[str, str], ...]
    caption: str
    mark: str = ""
    why: str = ""


def figures(runs: Mapping[str, RunReport]) -> list[Figure]:
    """What the runs stored, as figures: curves of all runs together, histograms of each run."""
    found = [*_scores(runs), *_thresholds(runs), *_reliability(runs)]
    for name, run in runs.items():
        found += _histograms(name, run)
    return found


def _figure(chart: Chart, series: Sequence[int], caption: str, why: str = "") -> Figure:
    legend = tuple((series_class(place), line.label) for place, line in zip(series, chart.lines, strict=True))
    return Figure(chart.title, svg(chart, series), legend, caption, NOT_PRIVATE if why else "", why)


def _scores(runs: Mapping[str, RunReport]) -> list[Figure]:
    """The test metric after each test, a figure for every metric."""
    by_metric: dict[str, dict[int, Line]] = {}
    for number, (name, run) in enumerate(runs.items()):
        for key, values in run.record.get("metrics", {}).items():
            if key.endswith("_per_epoch"):
                metric = key.removeprefix("test_").removesuffix("_per_epoch")
                every = run.record.get("arguments", {}).get("test_every", 1)
                line = Line(name, tuple(every * place for place in range(1, len(values) + 1)), tuple(values))
                by_metric.setdefault(metric, {})[number] = line
    found = []
    for metric, lines in by_metric.items():
        words = metric.replace("_", " ")
        chart = Chart(f"Test {words}", "epoch", words, tuple(lines.values()))
        found.append(_figure(chart, list(lines), "", TEST_RECORDS))
    return found


def _thresholds(runs: Mapping[str, RunReport]) -> list[Figure]:
    """The length of the threshold vector over the steps, for policies that change it."""
    lines: dict[int, Line] = {}
    seeds = False
    for number, (name, run) in enumerate(runs.items()):
        history = run.record.get("history") or {}
        rows = history.get("thresholds") or []
        points = _points(history.get("steps", []), rows, lambda row: math.sqrt(sum(each[0] ** 2 for each in row)))
        if points:
            lines[number] = _line(name, points)
            seeds = seeds or seeded(run)
    if not lines:
        return []
    values = [y for line in lines.values() for y in line.y]
    wide = min(values) > 0 and max(values) / min(values) > 50
    chart = Chart("Clipping threshold", "step", "threshold", tuple(lines.values()), log_y=wide)
    note = "Released with noise, and part of the epsilon above, or set by a schedule."
    return [_figure(chart, list(lines), note, KNOWN_NOISE if seeds else "")]


def _histograms(name: str, run: RunReport) -> list[Figure]:
    """The noised histogram of gradient norms at the first, a middle and the last step."""
    history = run.record.get("history") or {}
    rows, steps = history.get("statistic") or [], history.get("steps") or []
    full = [place for place, row in enumerate(rows) if len(row[0]) > 1 and _all_finite(row)]
    if not full:
        return []
    lines = []
    for place in dict.fromkeys((full[0], full[len(full) // 2], full[-1])):
        row = rows[place]
        counts = [math.sqrt(len(row)) * sum(group[at] for group in row) for at in range(len(row[0]))]
        middles = tuple(100 * (at + 0.5) / len(counts) for at in range(len(counts)))
        lines.append(Line(f"step {steps[place] + 1:,}", middles, tuple(counts)))
    chart = Chart(
        f"Released histogram of gradient norms: {name}", "% of the histogram's range", "records", tuple(lines)
    )
    note = (
        "Released with noise, so counts can be negative; part of the epsilon above. The last bin holds all longer ones."
    )
    return [_figure(chart, range(len(lines)), note, KNOWN_NOISE if seeded(run) else "")]


def _reliability(runs: Mapping[str, RunReport]) -> list[Figure]:
    """Accuracy against confidence on the test records."""
    lines: dict[int, Line] = {}
    for number, (name, run) in enumerate(runs.items()):
        bins = run.record.get("reliability") or {}
        pairs = zip(bins.get("confidence", ()), bins.get("accuracy", ()), strict=True)
        points = [(x, y) for x, y in pairs if x is not None and y is not None]
        if points:
            lines[number] = _line(f"{name}: ECE {bins['ece']:.3f}", points)
    if not lines:
        return []
    lines[SERIES - 1 if SERIES - 1 not in lines else len(runs)] = Line("perfectly calibrated", (0.0, 1.0), (0.0, 1.0))
    chart = Chart("Reliability", "confidence", "accuracy", tuple(lines.values()))
    return [_figure(chart, list(lines), "Below the diagonal a model is more confident than accurate.", TEST_RECORDS)]


def _line(label: str, points: Sequence[tuple[float, float]]) -> Line:
    return Line(label, tuple(x for x, _ in points), tuple(y for _, y in points))


def _points(steps: Sequence[int], rows: Sequence[Any], value: Callable[[Any], float]) -> list[tuple[float, float]]:
    """Evenly thinned points (step, value) without those that are not finite."""
    every = max(1, len(rows) // MOST_POINTS)
    found = [(float(step + 1), value(row)) for step, row in list(zip(steps, rows, strict=True))[::every]]
    return [(step, y) for step, y in found if math.isfinite(y)]


def _all_finite(row: Sequence[Sequence[float]]) -> bool:
    return all(math.isfinite(value) for group in row for value in group)
