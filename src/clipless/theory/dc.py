"""DC-SGD's expected error E(C) (equations 3-4), its minimiser, the convergence bounds (Theorem 3, equations 9-10), and the
noise of the moments accountant (Theorem 4).

The private mean gradient at threshold C differs from the mean of the batch by noise, of mean square σ²C²d/B², and by what
clipping cuts off. E(C) uses the mean square of what is cut off each record, which is at least the square of the mean.
"""

import math
from dataclasses import dataclass

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
    """E(C) = variance + clipping bias (equations 3-4): convex in C, with one minimum. With all norms and the batch that was
    drawn it is equation 3, with a batch's norms and the expected batch equation 4.

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

    It is not in the paper: unlike Theorem 3 it contains E(C) itself, so the C_t that minimises E(C_t) minimises the bound.
    From L(w − ηg̃) ≤ L(w) − (η/2)‖∇L‖² + (η/2)‖g̃ − ∇L‖² for η ≤ 1/L, with E‖g̃ − ∇L‖² ≤ E(C) on the full batch. Where
    batches are drawn, `sampling` bounds the variance of the batch's mean gradient, and twice the sum of both is taken, as
    ‖a + b‖² ≤ 2‖a‖² + 2‖b‖².
    """
    mean = float(np.mean(np.asarray(errors, float)))
    return 2 * loss_gap / (rate * steps) + (mean if sampling == 0 else 2 * (mean + sampling))


@dataclass(frozen=True)
class Descent:
    """T steps of DC-SGD on an L-smooth loss, as Theorem 3 describes them. `loss_drop` is E L(θ₁) − E L(θ_{T+1}).

    `squares` holds E‖ḡ_t‖² of each step, ḡ_t being the sum of the clipped gradients divided by the expected batch B, and
    `thresholds` the C_t. The histogram's price is left out: the noise multiplier is that of the gradient.
    """

    loss_drop: float
    rate: float
    smoothness: float
    squares: Floats
    thresholds: Floats
    noise_multiplier: float
    dimension: float
    batch: float

    def without_bias(self) -> float:
        """The first three terms of (9) and (10): the drop / (Tη), Lη times the mean of E‖ḡ_t‖², and the noise."""
        noise = variance(self.thresholds, self.noise_multiplier, self.dimension, self.batch)
        moved = self.smoothness * self.rate * (np.asarray(self.squares, float) + noise).mean()
        return float(self.loss_drop / (len(self.thresholds) * self.rate) + moved)


def percentile_bound(descent: Descent, lengths: npt.ArrayLike, percentile: float, longest: float) -> float:
    """Theorem 3 (9), DC-SGD-P: a bound on the mean of E‖∇L(θ_t)‖² over the steps.

    The clipping bias is the mean of E‖g_t‖·p'·G: `lengths` are the E‖g_t‖ of the whole data set, p' = 1 − p is the share of
    records that is clipped in each step, and G = `longest` bounds every record's gradient. The share is taken to be exact,
    so the histogram's error is left out. Any learning rate will do.
    """
    return descent.without_bias() + float(np.mean(np.asarray(lengths, float))) * (1 - percentile) * longest


def error_bound(descent: Descent, norms: Floats, longest: float) -> float:
    """Theorem 3 (10), DC-SGD-E: as (9), with the bias G·(1/N)Σ max(‖g_{t,i}‖ − C_t, 0) in the mean over the steps.

    `norms` are those of all N records in every step, [T, N].
    """
    cut = np.maximum(np.asarray(norms, float) - np.asarray(descent.thresholds, float)[:, None], 0.0)
    return descent.without_bias() + longest * float(cut.mean())


def worst_case_bound(
    loss_gap: float,
    rate: float,
    steps: float,
    smoothness: float,
    longest: float,
    clipped_share: float,
    noise_multiplier: float,
    dimension: float,
    batch: float,
    sample_rate: float,
) -> float:
    """What the second line of (9) stands for, with its constants: all norms and thresholds at their bound G.

    (L₀ − L*)/(Tη) + LηG²(1 + (1 − q)/B) + Lησ²dG²/B² + p'G². DC-SGD-E has p' = 1. The paper drops (1 − q)/B: it takes
    ‖ḡ_t‖ ≤ G, but ḡ_t is divided by the expected batch B, and Poisson sampling often draws more than B records.
    """
    sums = 1 + (1 - sample_rate) / batch
    noise = (noise_multiplier / batch) ** 2 * dimension
    return loss_gap / (steps * rate) + smoothness * rate * longest**2 * (sums + noise) + clipped_share * longest**2


def balanced_run(records: float, epsilon: float, delta: float, dimension: float) -> tuple[float, float]:
    """Steps T and learning rate η of Theorem 3, at which every term but the bias falls as √(d ln(1/δ))/(Nε).

    They are T = N²ε²/(d ln(1/δ)) and η = √(d ln(1/δ))/(Nε). Theorem 4's ε < c₁q²T then says d ln(1/δ) < c₁B²ε, which is a
    large batch: at ε = 2 and δ = 1e-5 above 402 for 28,058 parameters and above 7,588 for ten million (c₁ = 1).

    >>> balanced_run(60_000, 2.0, math.exp(-4), 10_000)
    (360000.0, 0.0016666666666666668)
    """
    cost = dimension * math.log(1 / delta)
    return (records * epsilon) ** 2 / cost, math.sqrt(cost) / (records * epsilon)


LARGEST_EPSILON, NOISE = 1.0, 2.25


def moments_noise_multiplier(epsilon: float, delta: float, sample_rate: float, steps: float) -> float:
    """Theorem 4: the noise multiplier σ = c₂q√(T ln(1/δ))/ε, for ε < c₁q²T.

    The theorem says that constants c₁ and c₂ exist. Here they are 1 and 2.25, enough wherever we compared them with exact
    accountants; training never uses them, and `clipless.noise_multiplier` needs no condition and adds less noise. The
    theorem lacks a condition: at q = 1 and a fixed δ no constants serve all ε below c₁T, since σ would be of the order of
    1/√T and ε of T². Its proof needs an order λ = 2 ln(1/δ)/ε of at least 1, so ε may be at most 2 ln(1/δ).

    Raises InvalidArgument if ε is too large for the formula.
    """
    digits = math.log(1 / delta)
    if epsilon >= LARGEST_EPSILON * sample_rate**2 * steps or epsilon > 2 * digits:
        raise InvalidArgument(
            f"Theorem 4 holds for an epsilon below q²T = {sample_rate**2 * steps:.3g} and of at most 2 ln(1/δ) = "
            f"{2 * digits:.3g}, got {epsilon:g}: use clipless.noise_multiplier, which needs no condition."
        )
    return NOISE * sample_rate * math.sqrt(steps * digits) / epsilon
