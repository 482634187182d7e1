"""What noise is worth to the accountant, written out once more for the tests."""

from torch import Tensor


def effective_multiplier(thresholds: Tensor, stddevs: Tensor) -> float:
    """The multiplier that a step with this noise is worth: (Σ_g (R_g/s_g)²)^(-1/2)."""
    return float((thresholds.double() / stddevs.double()).square().sum().rsqrt())
