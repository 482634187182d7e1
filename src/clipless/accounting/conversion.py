"""From a Rényi divergence to epsilon without loss."""

import math

import numpy as np

# Likelihood ratios at which the lower tangent is tried, and where float64 ends.
LOWER_TANGENTS = np.concatenate([-np.geomspace(1e-9, 100.0, 400), [-math.inf]])
LARGEST_EXPONENT = 500.0
ROUNDING = 1e-10


def renyi_epsilon(order: float, divergence: float, delta: float) -> float:
    """The least epsilon that a Rényi divergence of this order implies at delta, up to the grid of tangents.

    dp-accounting bounds (t − e^ε)₊, t a likelihood ratio, by a multiple of t^α, and jumps to 0 where it uses another
    inequality. Any curve g(t) = A·t^α − B·t + C that touches 0 at some u < 1 and the line t − e^ε beyond bounds it too,
    being convex. Its mean is A·e^((α−1)·divergence) − B + C: setting that to delta fixes e^ε for each u, and u = 0 is
    dp-accounting's bound. The best u is the lossless conversion (Asoodeh et al., arXiv:2001.05990).

    >>> from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
    >>> renyi_epsilon(2.0, 0.005, 0.01) < compute_epsilon([2.0], [0.005], 0.01)[0]
    True
    """
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon  # slow to import

    with np.errstate(all="ignore"):
        usual = float(compute_epsilon([order], [divergence], delta)[0])
    if not usual > 0 or (order - 1) * divergence > LARGEST_EXPONENT:
        return math.inf if math.isnan(usual) else usual
    with np.errstate(all="ignore"):
        log_u = LOWER_TANGENTS
        power = np.exp((order - 1) * log_u)  # u^(α−1)
        above_one = (order - 1) * np.expm1(order * log_u) - order * np.expm1((order - 1) * log_u)
        mean = math.expm1((order - 1) * divergence) + above_one  # of t^α − α·u^(α−1)·t + (α−1)·u^α
        touch = np.exp(np.log(power + mean / (order * delta)) / (order - 1))
        ratio = (order - 1) * (touch / order + delta / mean * power * (touch - np.exp(log_u)))
        best = float(np.fmin.reduce(np.log(ratio), initial=math.inf))
    return min(usual, max(0.0, best + ROUNDING * (1 + abs(best))))
