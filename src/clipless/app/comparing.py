"""Several clippings at one budget over repeated runs: the runs, their table, and what they cost if the data is private.

Each run is stored when it ends, and a stored run is not run again. No seed is fixed unless one is asked for, so that the
noise of every run is secret and the composed price holds.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import ttest_ind_from_stats

from clipless import defaults
from clipless.accounting import Ledger
from clipless.accounting.selection import GridSearch
from clipless.app.data import Data
from clipless.app.progress import OnProgress
from clipless.app.reproduce.summary import interval, with_interval
from clipless.app.training import TASKS, Result, TrainingProgress, TrainingSettings, train
from clipless.app.training.settings import optimizer_for
from clipless.errors import DamagedFile, InvalidArgument
from clipless.rounding import rounded_up
from clipless.runs.durable_files import replace_file

PLAIN = "none"
RUNS = "runs"
LEVEL = 0.05
MAY_DIFFER = (
    "On your data this may differ: the runs share one learning rate, epsilon, model and number of steps, and each clipping "
    "has its own best ones."
)


@dataclass(frozen=True)
class Compared:
    """The runs of one clipping. `scores` are those of the last tests, which are not private."""

    clipping: str
    metric: str
    higher_is_better: bool
    scores: tuple[float, ...]
    epsilon: float | None
    delta: float | None
    seconds: float

    @property
    def mean(self) -> float:
        return fmean(self.scores)

    @property
    def interval(self) -> float | None:
        """Half the length of the 95 % interval of the mean; None with a single run, or if one diverged."""
        return interval(self.scores) if math.isfinite(self.mean) else None

    @property
    def merit(self) -> float:
        """The mean as a number of which more is better; minus infinity if a run diverged."""
        if not math.isfinite(self.mean):
            return -math.inf
        return self.mean if self.higher_is_better else -self.mean

    @property
    def text(self) -> str:
        """The mean and its interval for a reader, accuracies in percent."""
        scale = 100.0 if self.metric.endswith("accuracy") else 1.0
        return with_interval(scale * self.mean, None if self.interval is None else scale * self.interval)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for files; numbers that JSON does not have become text."""
        scores = [score if math.isfinite(score) else str(score) for score in self.scores]
        means = {name: _json(value) for name, value in (("mean", self.mean), ("interval", self.interval))}
        return asdict(self) | {"scores": scores} | means


@dataclass(frozen=True)
class ComparisonPrice:
    """What everyone who sees the comparison has learned, if the data is private: all private runs composed."""

    runs: int
    epsilon: float | None
    delta: float | None
    plain_runs: int
    seeded: bool


def compare(
    data: Data,
    settings: TrainingSettings,
    clippings: Sequence[str],
    repeats: int,
    folder: Path,
    on_progress: OnProgress = lambda what, done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Compared]:
    """Train each clipping `repeats` times; runs that the folder already holds are not repeated.

    With a seed in `settings`, repetition k of every clipping uses that seed plus k, so that runs can be repeated.
    Raises InvalidArgument before training if the folder holds runs of another configuration.
    """
    chosen = [replace(settings, clipping=clipping) for clipping in dict.fromkeys(clippings)]
    for one in chosen:
        optimizer_for(one, data)
    tasks = [(one, number) for number in range(repeats) for one in chosen]
    for one, number in tasks:
        _stored(folder, data, one, number)
    total, done = float(len(tasks)), 0.0
    for one, number in tasks:
        what = f"{one.clipping}, run {number + 1} of {repeats}"
        on_progress(what, done, total)
        if _stored(folder, data, one, number) is None:
            seed = None if one.seed is None else one.seed + number
            result = train(
                data,
                replace(one, seed=seed),
                on_progress=_within(on_progress, what, done, total),
                stop=stop,
                group=False,
            )
            _store(folder, data, one, number, result)
        done += 1
    on_progress("done", total, total)
    return [_compared(data, [_stored(folder, data, one, n) or {} for n in range(repeats)]) for one in chosen]


def cost(folder: Path) -> ComparisonPrice:
    """The price of all runs that the folder holds, released together: those that are not in the table count as well."""
    records = [_read(path) for path in sorted((folder / RUNS).glob("*.json"))]
    private = [record for record in records if record["ledger"] is not None]
    if not private:
        return ComparisonPrice(0, None, None, len(records), seeded=False)
    delta = min(record["delta"] for record in private)
    runs: Any = [Ledger.from_dict(record["ledger"]).events for record in private]
    spent = GridSearch(len(runs)).epsilon(runs, delta, defaults.ACCOUNTANT)
    seeded = any(record["settings"]["seed"] is not None for record in private)
    return ComparisonPrice(len(private), spent, delta, len(records) - len(private), seeded)


def advice(found: Sequence[Compared]) -> str:
    """Which clipping to use, in a line. Those that a test cannot tell from the best one are named; if the default is
    among them, it is preferred, as it has no threshold to set."""
    private = sorted((one for one in found if one.clipping != PLAIN), key=lambda one: -one.merit)
    if not private:
        return "Nothing private was compared."
    best, others = private[0], private[1:]
    equal = [one for one in others if not _differ(best, one, LEVEL / max(1, len(others)))]
    if not others:
        return f"{best.clipping} is the only private one."
    if not equal:
        return (
            f"Take {best.clipping}: its {best.metric.replace('_', ' ')} is the best, beyond the spread of these runs."
        )
    taken = next((one for one in (best, *equal) if one.clipping == defaults.CLIPPING), best)
    rest = " or ".join(one.clipping for one in (best, *equal) if one is not taken)
    why = "it has no threshold to set" if taken.clipping == defaults.CLIPPING else "its mean is the best"
    leading = "" if taken is best else f" The best mean is that of {best.clipping}: more seeds may decide."
    return f"Take {taken.clipping}: these runs do not tell it from {rest}, and {why}.{leading}"


def price_text(found: ComparisonPrice) -> list[str]:
    """What the comparison costs if the data is private."""
    lines = []
    if found.epsilon is not None and found.delta is not None:
        spent = f"epsilon {rounded_up(found.epsilon)} at delta {rounded_up(found.delta)}"
        lines.append(
            f"If the training data is private: {_together(found.runs)} {spent}, and the run that is released afterwards "
            "comes on top. clipless tune --try clipping=... chooses within one total."
        )
    if found.plain_runs:
        runs = "1 run" if found.plain_runs == 1 else f"{found.plain_runs} runs"
        lines.append(f"{runs} had no privacy at all: on private data leave out {PLAIN}.")
    if found.seeded:
        lines.append("The seed is fixed: whoever knows it can subtract the noise, and the price above does not hold.")
    return [*lines, "The scores come from the test records, which no guarantee covers."]


def _together(runs: int) -> str:
    return "the private run costs" if runs == 1 else f"the {runs} private runs together cost"


def _within(on_progress: OnProgress, what: str, done: float, total: float) -> Callable[[TrainingProgress], None]:
    """Reports the steps of a run as a share of all runs."""
    return lambda at: on_progress(what, done + at.step / at.steps, total)


def _differ(one: Compared, other: Compared, level: float) -> bool:
    """Whether Welch's test tells the means apart; never with a single run, nor if all runs have the same score."""
    if math.isinf(other.merit):
        return not math.isinf(one.merit)
    if min(len(one.scores), len(other.scores)) < 2:
        return False
    (mean, spread, runs), (other_mean, other_spread, other_runs) = (
        (fmean(scores), stdev(scores), len(scores)) for scores in (one.scores, other.scores)
    )
    if spread == other_spread == 0:
        return mean != other_mean
    found = ttest_ind_from_stats(mean, spread, runs, other_mean, other_spread, other_runs, equal_var=False)
    return float(found.pvalue) < level


def _json(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _compared(data: Data, records: Sequence[Mapping[str, Any]]) -> Compared:
    first = records[0]
    return Compared(
        clipping=first["settings"]["clipping"],
        metric=first["metric"],
        higher_is_better=TASKS[data.task].higher_is_better,
        scores=tuple(record["score"] for record in records),
        epsilon=first["epsilon"],
        delta=first["delta"],
        seconds=sum(record["seconds"] for record in records),
    )


def _identity(data: Data, settings: TrainingSettings) -> dict[str, Any]:
    about = {"name": data.name, "train": len(data.train), "test": len(data.test)}
    if data.columns is not None:
        about["columns"] = json.loads(json.dumps(data.columns))
    return {"data": about, "settings": asdict(settings)}


def _path(folder: Path, clipping: str, number: int) -> Path:
    return folder / RUNS / f"{re.sub(r'[^A-Za-z0-9.=-]+', '-', clipping).strip('-')}-{number}.json"


def _stored(folder: Path, data: Data, settings: TrainingSettings, number: int) -> dict[str, Any] | None:
    """The record of a run that ended earlier; None if there is none. Raises if the file is that of another run."""
    path = _path(folder, settings.clipping, number)
    if not path.exists():
        return None
    record = _read(path)
    if {name: record[name] for name in ("data", "settings")} != _identity(data, settings):
        raise InvalidArgument(
            f"{folder} holds runs of another configuration ({path.name}), and what they spent stays spent: choose another "
            "folder (--out)."
        )
    return record


def _read(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = {"data", "settings", "score", "metric", "epsilon", "delta", "seconds", "ledger"} - record.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedFile(f"{path} cannot be read ({error}). Restore it from a copy.") from error
    if missing:
        raise DamagedFile(f"{path} is not the record of a run: {', '.join(sorted(missing))} missing. Restore it.")
    return record


def _store(folder: Path, data: Data, settings: TrainingSettings, number: int, result: Result) -> None:
    path = _path(folder, settings.clipping, number)
    record = _identity(data, settings) | {
        "score": result.score,
        "metric": result.metric,
        "epsilon": result.epsilon,
        "delta": result.delta,
        "seconds": round(result.seconds, 3),
        "ledger": result.ledger,
        "not_private": result.not_private(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write((json.dumps(record, indent=1) + "\n").encode()))
