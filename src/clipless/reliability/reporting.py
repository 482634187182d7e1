"""All scores of one run, together with which records they were computed on."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from clipless.arguments import named
from clipless.reliability.bootstrap import Interval, Metric, bootstrap
from clipless.reliability.metrics import accuracy, brier, ece, ece_when_calibrated, mce, nll

ORIGINS = {
    "test": "on {count} test records, which the model was not trained on",
    "train": "on {count} TRAINING records: NOT PRIVATE, the guarantee of the model does not cover these numbers",
}
MOST = {"accuracy": 1.0, "ece": 1.0, "mce": 1.0, "brier": 2.0, "nll": math.inf}
SCORES = {"accuracy": accuracy, "ece": ece, "mce": mce, "nll": nll, "brier": brier}


@dataclass(frozen=True)
class Reliability:
    """Accuracy and scores of a run's predictions, with intervals if they were asked for."""

    accuracy: float
    ece: float
    mce: float
    nll: float
    brier: float
    adaptive_ece: float
    ece_when_calibrated: float
    bins: int
    count: int
    records: str
    intervals: dict[str, Interval]

    @property
    def origin(self) -> str:
        """Which records the numbers come from, and what that means."""
        return ORIGINS[self.records].format(count=self.count)

    @property
    def private(self) -> bool:
        """Whether the model's guarantee still holds when these numbers are published: not for training records."""
        return self.records != "train"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for files."""
        return {**asdict(self), "private": self.private}

    def __str__(self) -> str:
        shown = {name: getattr(self, name) for name in SCORES}
        lines = [f"{name:9}{self.intervals.get(name, f'{value:.4f}')}" for name, value in shown.items()]
        floor = f"a calibrated model of these confidences would show ECE {self.ece_when_calibrated:.4f}"
        return "\n".join([*lines, floor, self.origin])


def report(
    probabilities: Any, labels: Any, bins: int = 15, records: str = "test", resamples: int = 0, seed: int = 0
) -> Reliability:
    """All scores at once; `resamples` draws give 95 % intervals. `records` says which records were given: test or train.

    >>> print(report([[0.75, 0.25]] * 4, [0, 0, 0, 1]))
    accuracy 0.7500
    ece      0.0000
    mce      0.0000
    nll      0.5623
    brier    0.3750
    a calibrated model of these confidences would show ECE 0.1727
    on 4 test records, which the model was not trained on
    """
    named("kind of records", records, ORIGINS)
    scores: dict[str, Metric] = {**SCORES, "ece": lambda p, y: ece(p, y, bins), "mce": lambda p, y: mce(p, y, bins)}
    intervals = {}
    if resamples:
        intervals = {
            name: bootstrap(score, probabilities, labels, 0.95, resamples, seed, MOST[name])
            for name, score in scores.items()
        }
    return Reliability(
        **{name: score(probabilities, labels) for name, score in scores.items()},
        adaptive_ece=ece(probabilities, labels, bins, adaptive=True),
        ece_when_calibrated=ece_when_calibrated(probabilities, bins),
        bins=bins,
        count=len(labels),
        records=records,
        intervals=intervals,
    )
