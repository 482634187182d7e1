"""Moments of the privacy loss, as arrays; dp-accounting sums the same series term by term.

A(α) is the mean of (mixture / N(0, σ²))^α under N(0, σ²), with the mixture (1 − q)·N(0, σ²) + q·N(1, σ²); the Rényi
divergence of order α is log A(α) / (α − 1). Mironov, Talwar and Zhang, arXiv:1908.10530, section 3.3.
"""

import math

import numpy as np
from scipy import special

from clipless.arrays import Floats

MAX_TERMS = 1000
NEGLIGIBLE = 30.0


def divergence(sample_rate: float, noise_multiplier: float, order: float) -> float:
    """The Rényi divergence of one Gaussian step on a Poisson batch; infinite where the series does not converge.

    >>> round(divergence(0.01, 1.0, 8), 6)
    0.000894
    """
    if sample_rate == 1:
        return order / (2 * noise_multiplier**2)
    with np.errstate(all="ignore"):
        log_a = (_whole if float(order).is_integer() else _fraction)(sample_rate, noise_multiplier, order)
    return log_a / (order - 1)


def _log_binomials(order: float, i: Floats) -> Floats:
    return np.asarray(special.gammaln(order + 1) - special.gammaln(i + 1) - special.gammaln(order - i + 1))


def _whole(q: float, z: float, order: float) -> float:
    i = np.arange(order + 1)
    terms = _log_binomials(order, i) + i * math.log(q) + (order - i) * math.log1p(-q) + (i * i - i) / (2 * z**2)
    return float(np.logaddexp.reduce(terms))


def _fraction(q: float, z: float, order: float) -> float:
    """Two series, for the outcomes below and above the point where q·N(1) overtakes (1 − q)·N(0)."""
    i = np.arange(MAX_TERMS, dtype=np.float64)
    j = order - i
    overtaken = z**2 * math.log(1 / q - 1) + 0.5
    log_binomials = _log_binomials(order, i)
    below = log_binomials + i * math.log(q) + j * math.log1p(-q) + (i * i - i) / (2 * z**2)
    below += special.log_ndtr((overtaken - i) / z)
    above = log_binomials + j * math.log(q) + i * math.log1p(-q) + (j * j - j) / (2 * z**2)
    above += special.log_ndtr((j - overtaken) / z)
    totals = np.logaddexp.accumulate(np.logaddexp(below, above))
    falling = np.zeros(MAX_TERMS, dtype=bool)
    falling[1:] = (np.diff(below) < 0) & (np.diff(above) < 0)
    settled = falling & (np.maximum(below, above) < totals - NEGLIGIBLE)
    return float(totals[np.argmax(settled)]) if settled.any() else math.inf
