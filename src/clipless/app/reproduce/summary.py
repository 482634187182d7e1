"""From stored runs to the lines of a table: means and intervals over seeds, beside what was published."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student

from clipless.app.reproduce.choosing import Choosing
from clipless.app.reproduce.configuration import Configuration, Published

CONFIDENCE = 0.95
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
        """Half the length of the 95 % interval of the mean; None with a single run."""
        return interval(self.scores)

    @property
    def text(self) -> str:
        """The mean and its interval.

        >>> TableLine("a", {}, "accuracy", (86.0, 87.0), None, {}, None, None, {}).text
        '86.50 ± 6.35'
        """
        return with_interval(self.mean, self.interval)


def interval(values: Sequence[float]) -> float | None:
    """Half the length of Student's 95 % interval of a mean; None with a single value.

    >>> round(interval([1.0, 2.0, 3.0]), 3)
    2.484
    """
    if len(values) < 2:
        return None
    return float(student.ppf(0.5 + CONFIDENCE / 2, len(values) - 1) * stdev(values) / len(values) ** 0.5)


def with_interval(mean: float, half: float | None) -> str:
    """A mean and half its interval for a reader, with as many digits as are meaningful.

    >>> with_interval(17894993.7, 9842816.4), with_interval(0.42291, None)
    ('1.8e+07 ± 9.8e+06', '0.4229')
    """
    form = ".1e" if abs(mean) >= MANY else ".2f" if abs(mean) >= 1 else ".4f"
    return f"{mean:{form}}" + ("" if half is None else f" ± {half:{form}}")


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
        extra = [
            with_interval(fmean(line.extra[key]), interval(line.extra[key])) if key in line.extra else ""
            for key in extras
        ]
        rows.append([line.row, spent, *point, *extra, line.text, str(len(line.scores)), theirs, also])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def metric_name(metric: str) -> str:
    """A metric for a reader.

    >>> metric_name("label_accuracy")
    'label accuracy, %'
    """
    return metric.replace("_", " ") + (", %" if metric.endswith("accuracy") else "")


def _line(experiment: Configuration, group: Sequence[Mapping[str, Any]]) -> TableLine:
    first = group[0]
    scale = 100.0 if first["metric"].endswith("accuracy") else 1.0
    choosing = next(row.choosing for row in experiment.rows if row.name == first["row"])
    names = [name for name in (first.get("extra") or {}) if isinstance(first["extra"][name], (int, float))]
    return TableLine(
        row=first["row"],
        point=first["point"],
        metric=first["metric"],
        scores=tuple(scale * score for score in _scores(choosing, group)),
        epsilon=first["epsilon"] if choosing is None else first["settings"]["epsilon"],
        epsilons=(first["epsilons"] or {}) if choosing is None else {},
        noise_multiplier=(first.get("plan") or {}).get("noise_multiplier"),
        published=experiment.published_for(first["row"], first["point"]),
        extra={name: tuple(record["extra"][name] for record in group) for name in names},
    )


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
