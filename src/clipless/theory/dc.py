"""DC-SGD's expected error E(C) (Theorem 3), its minimiser, and the convergence bound (Theorem 4).

The private mean gradient at threshold C differs from the mean of the batch by noise, of mean square σ²C²d/B², and by what
clipping cuts off. E(C) uses the mean square of what is cut off each record, which is at least the square of the mean.
The theorems are derived here from these definitions; the paper's own statement of Theorem 4 may use other constants.
"""

import numpy as np
import numpy.typing as npt

from clipless.arrays import Floats
from clipless.errors import InvalidArgument


def variance(threshold: npt.ArrayLike, noise_multiplier: float, dimension: float, batch: float) -> Floats:
    """σ²C²d/B²: the mean square of the noise on the mean gradient."""
    found: Floats = (noise_multiplier / batch) ** 2 * dimension * np.asarray(threshold, float) ** 2
    return found


def clipping_bias(threshold: npt.ArrayLike, norms: Floats) -> Floats:
    """The mean of max(‖g_i‖ − C, 0)²: a bound on the squared distance of the clipped mean from the mean."""
    cut = np.maximum(np.asarray(norms, float) - np.asarray(threshold, float)[..., None], 0.0)
    found: Floats = (cut * cut).mean(-1)
    return found


def expected_error(
    threshold: npt.ArrayLike, norms: Floats, noise_multiplier: float, dimension: float, batch: float
) -> Floats:
    """E(C) = variance + clipping bias: convex in C, with one minimum.

    >>> float(expected_error(1.0, np.array([0.5, 3.0]), noise_multiplier=1.0, dimension=4.0, batch=2.0))
    3.0
    """
    return variance(threshold, noise_multiplier, dimension, batch) + clipping_bias(threshold, norms)


def best_threshold(norms: Floats, noise_multiplier: float, dimension: float, batch: float) -> float:
    """The C that minimises E(C), exactly: where (σ²d/B²)·C equals the mean of max(‖g_i‖ − C, 0).

    Between two neighbouring norms that is linear: with k norms above C, C = (their sum)/(aN + k), a = σ²d/B².
    """
    ordered = np.sort(np.asarray(norms, float))[::-1]
    if not len(ordered):
        raise InvalidArgument("there are no norms, so there is no best threshold.")
    cost = (noise_multiplier / batch) ** 2 * dimension
    if cost == 0:
        return float(ordered[0])
    above = np.arange(1, len(ordered) + 1)
    candidates = np.cumsum(ordered) / (cost * len(ordered) + above)
    below = np.append(ordered[1:], 0.0)
    return float(candidates[np.flatnonzero(candidates >= below)[0]])


def convergence_bound(
    loss_gap: float, rate: float, steps: float, errors: npt.ArrayLike, sampling: float = 0.0
) -> float:
    """A bound on the mean over T steps of E‖∇L‖² at learning rate η ≤ 1/L: 2(L₀−L*)/(ηT) + the mean of E(C_t).

    From L(w − ηg̃) ≤ L(w) − (η/2)‖∇L‖² + (η/2)‖g̃ − ∇L‖² for η ≤ 1/L, with E‖g̃ − ∇L‖² ≤ E(C) on the full batch. Where
    batches are drawn, `sampling` bounds the variance of the batch's mean gradient, and twice the sum of both is taken, as
    ‖a + b‖² ≤ 2‖a‖² + 2‖b‖². The C_t that minimises E(C_t) minimises the bound.
    """
    mean = float(np.mean(np.asarray(errors, float)))
    return 2 * loss_gap / (rate * steps) + (mean if sampling == 0 else 2 * (mean + sampling))
