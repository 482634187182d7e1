"""The clipping rules on NumPy arrays: factor(norms, threshold). `clipless.clipping` holds those that training uses."""

from collections.abc import Callable

import numpy as np

from clipless.arrays import Floats

ArrayRule = Callable[[Floats, float], Floats]


def abadi(norms: Floats, threshold: float) -> Floats:
    """min(1, R/‖g‖)."""
    return np.minimum(1.0, auto_v(norms, threshold)) + (np.asarray(norms) == 0)


def auto_v(norms: Floats, threshold: float) -> Floats:
    """R/‖g‖, and 0 at ‖g‖ = 0."""
    norms = np.asarray(norms, float)
    return np.divide(threshold, norms, out=np.zeros(norms.shape), where=norms > 0)


def auto_s(gamma: float = 0.01) -> ArrayRule:
    """R/(‖g‖ + γ)."""
    return lambda norms, threshold: threshold / (np.asarray(norms, float) + gamma)


def global_(cutoff: float) -> ArrayRule:
    """R/Z up to the cutoff Z, and 0 above."""
    return lambda norms, threshold: np.where(np.asarray(norms) <= cutoff, threshold / cutoff, 0.0)


def named_rules(gamma: float = 0.01, cutoff: float = 1.0) -> dict[str, ArrayRule]:
    """The four rules by the names that `clipping=` takes."""
    return {"abadi": abadi, "auto-v": auto_v, "auto-s": auto_s(gamma), "global": global_(cutoff)}
