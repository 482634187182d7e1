"""AUTO Theorem 5: the bound at a fixed privacy budget, the four laws that follow, and the best learning rate.

With μ-GDP fixed, σ follows from μ, batch B, data size n and steps T by the central limit theorem, and the argument of the
bound becomes 4√((L₀−L*)·L·(1/T + d/(μ²n²) + O(1/(B²T)))).
"""

import math
from dataclasses import dataclass

from clipless.theory.auto_bounds import auto_s_bound, optimisation_term


@dataclass(frozen=True)
class ProblemConstants:
    """What is trained: n records, d parameters, L₀ − L*, smoothness L, gradient noise ξ, and the budget μ of GDP."""

    records: float = 50_000
    dimension: float = 100_000
    loss_gap: float = 2.0
    smoothness: float = 1.0
    xi: float = 1.0
    mu: float = 1.0


def gdp_noise_multiplier(mu: float, batch: float, records: float, steps: float) -> float:
    """The σ at which T steps of rate B/n are μ-GDP in the limit: μ = (B/n)·√(T(e^{1/σ²} − 1))."""
    return math.log1p((mu * records / batch) ** 2 / steps) ** -0.5


def private_term(constants: ProblemConstants, steps: float, batch: float) -> float:
    """The argument of the bound with the exact σ of the limit formula."""
    sigma = gdp_noise_multiplier(constants.mu, batch, constants.records, steps)
    return optimisation_term(steps, constants.loss_gap, constants.smoothness, sigma, constants.dimension, batch)


def leading_term(constants: ProblemConstants, steps: float) -> float:
    """4√((L₀−L*)·L·(1/T + d/(μ²n²))): the argument without its O(1/(B²T)), the same for every batch.

    That remainder is at most d/(2B²T) in the bracket, as 1/log(1+x) < 1/x + ½.
    """
    noise = constants.dimension / (constants.mu * constants.records) ** 2
    return 4 * math.sqrt(constants.loss_gap * constants.smoothness * (1 / steps + noise))


def private_bound(constants: ProblemConstants, steps: float, batch: float, gamma: float = 0.01) -> float:
    """AUTO-S's bound on the gradient at this budget.

    The laws: it falls (1) with more steps at the same batch, though each then has more noise, (2) with a larger batch at the
    same steps, (3) with a smaller loss gap, smoothness or ξ, as after pretraining. Law (4) is `best_learning_rate`.
    """
    return auto_s_bound(private_term(constants, steps, batch), constants.xi, gamma)


def best_learning_rate(constants: ProblemConstants, steps: float) -> float:
    """√((L₀−L*)·μ²n² / (L·(μ²n² + dT))): the η₀ of ηB = η₀/√T, which does not depend on the batch.

    It minimises the paper's (L₀−L*)/η₀ + η₀·L·(1+σ²d/B²) with σ²/B² = T/(μ²n²). It is larger for smaller models, weaker
    privacy and fewer steps.
    """
    signal = (constants.mu * constants.records) ** 2
    return math.sqrt(constants.loss_gap * signal / (constants.smoothness * (signal + constants.dimension * steps)))


def cost_of_rate(constants: ProblemConstants, steps: float, rate: float) -> float:
    """(L₀−L*)/η₀ + η₀·L·(1 + dT/(μ²n²)): √T times the largest possible mean of a step's gain ½‖g‖f at learning rate η₀."""
    noise = constants.dimension * steps / (constants.mu * constants.records) ** 2
    return constants.loss_gap / rate + rate * constants.smoothness * (1 + noise)
