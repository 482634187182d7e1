"""Scores of predicted probabilities, each a mean over the records given. Smaller is better, except for accuracy."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from clipless.arguments import whole
from clipless.arrays import Floats
from clipless.reliability.checks import Labels, checked


@dataclass(frozen=True)
class Bins:
    """Predictions sorted into bins by their confidence; empty bins have confidence and accuracy NaN."""

    edges: Floats
    counts: Floats
    confidence: Floats
    accuracy: Floats

    @property
    def gaps(self) -> Floats:
        """|accuracy − confidence| of the bins that are not empty."""
        found: Floats = np.abs(self.accuracy - self.confidence)[self.counts > 0]
        return found

    def ece(self) -> float:
        return float(self.gaps @ (self.counts[self.counts > 0] / self.counts.sum()))

    def mce(self) -> float:
        return float(self.gaps.max())


def bins_of(probabilities: Any, labels: Any, bins: int = 15, adaptive: bool = False) -> Bins:
    """Bins by confidence, the probability of the predicted class: equally wide on [0, 1], or equally full if `adaptive`.

    A confidence on the edge of two equally wide bins belongs to the lower one.
    """
    confidence, correct = confidence_and_correctness(*checked(probabilities, labels))
    return sorted_into(confidence, correct, whole("bins", bins), adaptive)


def ece(probabilities: Any, labels: Any, bins: int = 15, adaptive: bool = False) -> float:
    """Expected calibration error: the mean over records of |accuracy − confidence| of the bin they are in.

    It is biased upwards, because the mean absolute value of noise is positive: `ece_when_calibrated` says by how much.

    >>> ece([[0.75, 0.25]] * 4, [0, 0, 0, 1]), ece([[1.0, 0.0]] * 4, [0, 0, 0, 1])
    (0.0, 0.25)
    """
    return bins_of(probabilities, labels, bins, adaptive).ece()


def mce(probabilities: Any, labels: Any, bins: int = 15, adaptive: bool = False) -> float:
    """Maximum calibration error: the largest |accuracy − confidence| of a bin, even one with a single record."""
    return bins_of(probabilities, labels, bins, adaptive).mce()


def nll(probabilities: Any, labels: Any) -> float:
    """Negative log-likelihood in nats; infinite if a true class was given probability 0.

    >>> round(nll([0.5, 0.5], [0, 1]), 4)
    0.6931
    """
    table, found = checked(probabilities, labels)
    return float(losses(table, found).mean())


def brier(probabilities: Any, labels: Any) -> float:
    """Squared distance of the probabilities from the one-hot truth, summed over classes: from 0 to 2.

    For probabilities of shape [N] it is the binary form (p − y)², from 0 to 1, half of what the two columns sum to.

    >>> brier([[0.8, 0.2]], [0]), brier([0.2], [0])  # doctest: +NUMBER
    (0.08, 0.04)
    """
    table, found = checked(probabilities, labels)
    squares = float(squared_distances(table, found).mean())
    return squares if np.ndim(probabilities) == 2 else squares / 2


def accuracy(probabilities: Any, labels: Any) -> float:
    """The share of records whose most probable class is the true one; a tie goes to the first class."""
    return float(confidence_and_correctness(*checked(probabilities, labels))[1].mean())


def ece_when_calibrated(probabilities: Any, bins: int = 15, adaptive: bool = False) -> float:
    """The ECE to expect of a perfectly calibrated model with these confidences: the estimator's bias at the best.

    In a bin of n records the gap is then nearly normal with variance Σ c(1−c)/n², and the mean of its absolute value is
    √(2/π) standard deviations. An ECE that is not well above this says nothing against a model.
    """
    table, _ = checked(probabilities, np.zeros(len(probabilities), np.int64))
    confidence = table.max(1)
    variance = sorted_into(confidence, confidence * (1 - confidence), whole("bins", bins), adaptive)
    full = variance.counts > 0
    spread = np.sqrt(variance.accuracy[full] * variance.counts[full])
    return float(math.sqrt(2 / math.pi) * spread.sum() / len(confidence))


def confidence_and_correctness(table: Floats, labels: Labels) -> tuple[Floats, Floats]:
    """For each record the probability of the predicted class, and 1 where that class is the true one."""
    predicted = table.argmax(1)
    return table[np.arange(len(table)), predicted], (predicted == labels).astype(np.float64)


def true_class_probability(table: Floats, labels: Labels) -> Floats:
    """For each record the probability of its true class."""
    found: Floats = table[np.arange(len(table)), labels]
    return found


def losses(table: Floats, labels: Labels) -> Floats:
    """The negative log-likelihood of each record."""
    with np.errstate(divide="ignore"):
        found: Floats = -np.log(true_class_probability(table, labels))
    return np.abs(found)


def squared_distances(table: Floats, labels: Labels) -> Floats:
    """Σ_k (p_k − y_k)² of each record."""
    found: Floats = (table**2).sum(1) - 2 * true_class_probability(table, labels) + 1
    return found


def sorted_into(confidence: Floats, values: Floats, bins: int, adaptive: bool) -> Bins:
    """Counts, mean confidence and mean value of each bin."""
    edges, places = _equally_full(confidence, bins) if adaptive else _equally_wide(confidence, bins)
    counts = np.bincount(places, minlength=bins).astype(np.float64)
    with np.errstate(invalid="ignore"):
        means = (np.bincount(places, weights=each, minlength=bins) / counts for each in (confidence, values))
        return Bins(edges, counts, next(means), next(means))


def _equally_wide(confidence: Floats, bins: int) -> tuple[Floats, Any]:
    edges = np.linspace(0, 1, bins + 1)
    return edges, np.searchsorted(edges[1:-1], confidence, side="left")


def _equally_full(confidence: Floats, bins: int) -> tuple[Floats, Any]:
    """Bins whose sizes differ by at most one where no two confidences are equal; equal ones share a bin."""
    starts = np.ceil(np.arange(1, bins) * len(confidence) / bins).astype(int)
    inner = np.sort(confidence)[np.minimum(starts, len(confidence) - 1)]
    return np.concatenate([[0.0], inner, [1.0]]), np.searchsorted(inner, confidence, side="right")
