"""AUTO section 3.1 and figures 2 and 4: which factors point along the true gradient, and what each rule does to norms.

Among factors with c_i‖g_i‖ ≤ R the sum Σ c_i g_i makes most progress along Σ g_j with c_i = R/‖g_i‖ where ⟨g_i, Σ g_j⟩ is
positive and 0 elsewhere. It is not a clipping rule that could be used, since c_i depends on other records; where all dot
products are positive it is AUTO-V.
"""

import numpy as np

from clipless.arrays import Floats
from clipless.theory.rules import ArrayRule, auto_v


def dot_products(gradients: Floats) -> Floats:
    """⟨g_i, Σ_j g_j⟩ of each row."""
    found: Floats = gradients @ gradients.sum(0)
    return found


def best_factors(gradients: Floats, threshold: float = 1.0) -> Floats:
    """The factors that maximise ⟨Σ c_i g_i, Σ g_j⟩ subject to 0 ≤ c_i ≤ R/‖g_i‖."""
    return auto_v(np.linalg.norm(gradients, axis=1), threshold) * (dot_products(gradients) > 0)


def progress(gradients: Floats, factors: Floats, threshold: float = 1.0) -> float:
    """⟨Σ c_i g_i, Σ g_j⟩ as a share of the best that the bound on norms allows."""
    along = dot_products(gradients)
    return float(factors @ along / (best_factors(gradients, threshold) @ along))


def distance_from_best(gradients: Floats, rule: ArrayRule, threshold: float = 1.0) -> float:
    """The mean of |c_i − c_i*|·‖g_i‖/R: the share of a record's bound by which the rule differs from the best factors."""
    norms = np.linalg.norm(gradients, axis=1)
    return float((np.abs(rule(norms, threshold) - best_factors(gradients, threshold)) * norms).mean() / threshold)


def norms_after(norms: Floats, rule: ArrayRule, threshold: float = 1.0) -> Floats:
    """The norms of the clipped gradients, c_i‖g_i‖."""
    found: Floats = rule(norms, threshold) * norms
    return found


def sample_gradients(count: int, dimension: int, noise: float, spread: float = 0.0, seed: int = 0) -> Floats:
    """Gradients a(g + Δ) around one direction g, with ‖Δ‖/‖g‖ about `noise` and lengths about 1.

    Δ is normal. Each gradient has a log-normal scale a, whose logarithm has standard deviation `spread`.
    """
    draws = np.random.default_rng(seed)
    gradients = draws.normal(scale=noise / np.sqrt(dimension), size=(count, dimension))
    gradients[:, 0] += 1
    found: Floats = gradients * (draws.lognormal(0, spread, size=(count, 1)) / np.hypot(1, noise))
    return found
