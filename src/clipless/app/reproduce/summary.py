"""From stored runs to the lines of a table: means and intervals over seeds, beside what was published; and differences of
rows, paired by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student

from clipless.app.reproduce.choosing import Choosing
from clipless.app.reproduce.configuration import Configuration, Published
from clipless.app.reproduce.measures import TIME

CONFIDENCE = 0.95
# Of fewer seeds every run is shown: an interval of two is 13 times as long as half the distance between them.
FEWEST_SEEDS = 5
MANY = 1e5


@dataclass(frozen=True)
class TableLine:
    """The runs of one row at one point of the grid. `scores` are accuracies in percent, or the metric as it is."""

    row: str
    point: Mapping[str, Any]
    metric: str
    scores: tuple[float, ...]
    epsilon: float | None
    epsilons: Mapping[str, float]
    noise_multiplier: float | None
    published: Published | None
    extra: Mapping[str, tuple[float, ...]]

    @property
    def mean(self) -> float:
        return fmean(self.scores)

    @property
    def interval(self) -> float | None:
        """Half the length of the 95 % interval of the mean; None with fewer than `FEWEST_SEEDS` runs."""
        return interval(self.scores) if len(self.scores) >= FEWEST_SEEDS else None

    @property
    def text(self) -> str:
        """The mean and its interval, or the runs.

        >>> TableLine("a", {}, "accuracy", (86.0, 87.0), None, {}, None, None, {}).text
        '86.50 (86.00, 87.00)'
        """
        return summarized(self.scores)


@dataclass(frozen=True)
class Difference:
    """What the scores of one row are above those of another, at one point of the grid, for every seed that both have."""

    first: str
    second: str
    point: Mapping[str, Any]
    values: tuple[float, ...]
    form: str

    @property
    def text(self) -> str:
        """The mean difference and its interval, or the differences of all seeds, with the digits of the scores."""
        return summarized(self.values, self.form)


def summarized(values: Sequence[float], form: str | None = None) -> str:
    """The mean of some runs with its 95 % interval if they are `FEWEST_SEEDS` or more, else with every run.

    >>> summarized([1.0]), summarized([1.0, 2.5], "+.1f"), summarized([1.0, 2.0, 3.0, 4.0, 5.0])
    ('1.00', '+1.8 (+1.0, +2.5)', '3.00 ± 1.96')
    """
    mean = with_interval(fmean(values), interval(values) if len(values) >= FEWEST_SEEDS else None, form)
    runs = ", ".join(with_interval(value, None, form) for value in values)
    return f"{mean} ({runs})" if 1 < len(values) < FEWEST_SEEDS else mean


def interval(values: Sequence[float]) -> float | None:
    """Half the length of Student's 95 % interval of a mean; None with a single value.

    >>> round(interval([1.0, 2.0, 3.0]), 3)
    2.484
    """
    if len(values) < 2:
        return None
    return float(student.ppf(0.5 + CONFIDENCE / 2, len(values) - 1) * stdev(values) / len(values) ** 0.5)


def with_interval(mean: float, half: float | None, form: str | None = None) -> str:
    """A mean and half its interval for a reader, with as many digits as are meaningful, or in a given form.

    >>> with_interval(17894993.7, 9842816.4), with_interval(0.42291, None)
    ('1.8e+07 ± 9.8e+06', '0.4229')
    """
    form = digits(mean) if form is None else form
    return f"{mean:{form}}" + ("" if half is None else f" ± {half:{form.lstrip('+')}}")


def digits(size: float) -> str:
    """The format of numbers of this size."""
    return ".1e" if abs(size) >= MANY else ".2f" if abs(size) >= 1 else ".4f"


def lines(experiment: Configuration, records: Sequence[Mapping[str, Any]]) -> list[TableLine]:
    """The lines of an experiment's table, for what has been run. A private choice whose candidates have not all been run has
    no line: the best of some would pass for the best of all."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["row"], str(record["point"])), []).append(record)
    found = [_line(experiment, group) for group in groups.values()]
    return [line for line in found if line.scores]


def markdown(found: Sequence[TableLine]) -> str:
    """The table: one line for every row and point, ours beside the paper's."""
    keys = list(dict.fromkeys(key for line in found for key in line.point if key != "epsilon"))
    extras = list(dict.fromkeys(key for line in found for key in line.extra))
    metric = metric_name(found[0].metric)
    head = ["", "ε", *keys, *extras, f"{metric}, ours", "seeds", "published", "ε of the same run"]
    rows = [head, ["---"] * len(head)]
    for line in found:
        one = line.published
        theirs = "" if one is None else with_interval(one.value, one.interval)
        also = ", ".join(f"{name} {value:.2f}" for name, value in line.epsilons.items())
        spent = "not private" if line.epsilon is None else f"{line.epsilon:.3g}"
        point = [str(line.point.get(key, "")) for key in keys]
        extra = [summarized(line.extra[key]) if key in line.extra else "" for key in extras]
        rows.append([line.row, spent, *point, *extra, line.text, str(len(line.scores)), theirs, also])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def differences(experiment: Configuration, records: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """The differences of the experiment's pairs of rows at every point where both have been run with the same seeds."""
    scale = _scale(records[0]["metric"]) if records else 1.0
    found = []
    for first, second in experiment.pairs:
        own, other = (_by_place(experiment, records, row) for row in (first, second))
        points: dict[str, tuple[Mapping[str, Any], list[float]]] = {}
        for (place, seed), (point, score) in own.items():
            if (place, seed) in other:
                points.setdefault(place, (point, []))[1].append(scale * (score - other[place, seed][1]))
        form = "+" + digits(scale * max((abs(score) for _, score in own.values()), default=0.0))
        found += [Difference(first, second, point, tuple(values), form) for point, values in points.values()]
    return found


def differences_table(found: Sequence[Difference], metric: str) -> str:
    """Markdown of paired differences; nothing if there are none."""
    if not found:
        return ""
    keys = list(dict.fromkeys(key for one in found for key in one.point))
    rows = [["paired by seed", *keys, f"difference, {metric_name(metric)}", "above", "seeds"]]
    rows.append(["---"] * len(rows[0]))
    for one in found:
        above = f"{sum(value > 0 for value in one.values)} of {len(one.values)}"
        point = [str(one.point.get(key, "")) for key in keys]
        rows.append([f"{one.first} minus {one.second}", *point, one.text, above, str(len(one.values))])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _by_place(
    experiment: Configuration, records: Sequence[Mapping[str, Any]], row: str
) -> dict[tuple[str, int], tuple[Mapping[str, Any], float]]:
    """The point and score of a row's runs by their values of the grid's settings, the row's own ones included, and seed."""
    found: dict[tuple[str, int], tuple[Mapping[str, Any], float]] = {}
    for record in records:
        if record["row"] == row:
            settings = {**record["settings"], **record["point"]}
            point = {key: settings[key] for key in experiment.grid if key in settings}
            found[str(point), int(record["settings"]["seed"])] = point, float(record["score"])
    return found


def _scale(metric: str) -> float:
    return 100.0 if metric.endswith("accuracy") else 1.0


def metric_name(metric: str) -> str:
    """A metric for a reader.

    >>> metric_name("label_accuracy")
    'label accuracy, %'
    """
    return metric.replace("_", " ") + (", %" if metric.endswith("accuracy") else "")


def _line(experiment: Configuration, group: Sequence[Mapping[str, Any]]) -> TableLine:
    first = group[0]
    scale = _scale(first["metric"])
    choosing = next(row.choosing for row in experiment.rows if row.name == first["row"])
    return TableLine(
        row=first["row"],
        point=first["point"],
        metric=first["metric"],
        scores=tuple(scale * score for score in _scores(choosing, group)),
        epsilon=first["epsilon"] if choosing is None else first["settings"]["epsilon"],
        epsilons=(first["epsilons"] or {}) if choosing is None else {},
        noise_multiplier=(first.get("plan") or {}).get("noise_multiplier"),
        published=experiment.published_for(first["row"], first["point"]),
        extra=_extra(choosing, group),
    )


def _extra(choosing: Choosing | None, group: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """The further numbers that all runs of a line have, for every seed. The time of a choice is that of all its candidates;
    nothing else can be said of their other numbers."""
    kept = [record.get("extra") or {} for record in group]
    names = [
        name for name, value in kept[0].items() if isinstance(value, (int, float)) and all(name in one for one in kept)
    ]
    if choosing is None:
        return {name: tuple(one[name] for one in kept) for name in names}
    seeds: dict[int, float] = {}
    for record in group if TIME in names else ():
        seed = record["settings"]["seed"]
        seeds[seed] = seeds.get(seed, 0.0) + record["extra"][TIME]
    return {TIME: tuple(seeds.values())} if seeds else {}


def _scores(choosing: Choosing | None, group: Sequence[Mapping[str, Any]]) -> list[float]:
    """The score of every seed: that of its run, or the mean score of a private choice among its candidates' runs, if all of
    them are there."""
    if choosing is None:
        return [record["score"] for record in group]
    seeds: dict[int, list[float]] = {}
    for record in group:
        seeds.setdefault(record["settings"]["seed"], []).append(record["score"])
    count = len(list(choosing.candidates()))
    return [choosing.expected_score(scores) for scores in seeds.values() if len(scores) == count]
