"""DC-SGD-E: the threshold that minimises the expected error of the private gradient, from a private histogram."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from clipless.arrays import Floats
from clipless.thresholds.histogram import Histogram
from clipless.thresholds.policy import LEAST, MOST, Setting, State, shared_out

# NumPy arrays: a single torch call takes longer than all that is computed here for a group.
CANDIDATES = np.arange(1, 21) / 10
MOST_ROUNDS = 64


@dataclass(frozen=True)
class DCE(Histogram):
    """Minimizes E(C) = noise + bias over candidates 0.1C … 2C, and again around the best one if it is the first or the last.

    Negative bins count as zero in E. The range doubles when half of the norms are in the last bin and halves when almost
    none are in its upper half. This uses the bins as released: if negative bins were set to zero, noise would look like
    norms, and a range that starts too wide would stay too wide. A histogram whose noised sum is not positive changes
    nothing.
    """

    def init(self, setting: Setting) -> State:
        start = shared_out(self.start, setting.groups)
        return {"thresholds": start, "range": start.double() * self.bins}

    def update(self, state: State, released: Tensor | None, setting: Setting) -> State:
        state = {name: value.clone() for name, value in state.items()}
        noised, middles = self.counts(released, setting).numpy(), self.middles(state).numpy()
        thresholds, ranges = state["thresholds"].numpy(), state["range"].numpy()
        for g in range(setting.groups):
            if noised[g].sum() <= 0:
                continue
            cost = setting.gradient_multiplier**2 * setting.noise_dimensions[g] / setting.expected_batch**2
            thresholds[g] = best_threshold(noised[g].clip(min=0), middles[g], float(thresholds[g, 0]), cost)
            ranges[g] = min(max(float(ranges[g, 0]) * rescaled(noised[g]), LEAST), MOST)
        return state


def expected_error(candidates: Floats, counts: Floats, middles: Floats, cost: float) -> Floats:
    """E(C) for each candidate: `cost`·C² of noise and the mean square of what clipping cuts off."""
    cut = np.maximum(middles - candidates[:, None], 0.0)
    return cost * candidates**2 + (cut * cut) @ counts / counts.sum()


def best_threshold(counts: Floats, middles: Floats, threshold: float, cost: float) -> float:
    """The candidate with the least expected error, searched outwards from the current threshold.

    >>> round(best_threshold(np.array([0.0, 0.0, 1.0]), np.array([1.0, 2.0, 3.0]), threshold=10.0, cost=0.5), 6)
    2.0
    """
    for _ in range(MOST_ROUNDS):
        candidates = threshold * CANDIDATES
        best = int(expected_error(candidates, counts, middles, cost).argmin())
        threshold = min(max(float(candidates[best]), LEAST), MOST)
        if 0 < best < len(CANDIDATES) - 1 or threshold in (LEAST, MOST):
            break
    return threshold


def rescaled(counts: Floats) -> float:
    """The factor by which the range of a histogram should change: 2, ½ or 1."""
    total, bins = float(counts.sum()), len(counts)
    if float(counts[-1]) >= 0.5 * total:
        return 2.0
    return 0.5 if float(counts[bins // 2 :].sum()) <= total / bins else 1.0
