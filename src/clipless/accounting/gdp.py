"""The central-limit approximation (Gaussian DP). It can under-report and never serves as a guarantee."""

import math

from clipless.accounting.gaussian import gaussian_epsilon
from clipless.accounting.release import Release


def gdp_epsilon(releases: tuple[Release, ...], delta: float) -> float:
    """Epsilon by μ = q·√(T·(e^{1/σ²} − 1)), in quadrature over different releases; at q = 1 the exact μ = √T/σ.

    Infinite where μ² leaves the range of floats, and where norms are estimated by projections.
    """
    return gaussian_epsilon(math.hypot(*(_mu(release) for release in releases)), delta)


def _mu(release: Release) -> float:
    if release.projections:
        return math.inf
    if release.sample_rate == 1:
        return math.sqrt(release.steps) / release.noise_multiplier
    variance = 1 / release.noise_multiplier**2
    log_moment = variance if variance > 30 else math.log(math.expm1(variance))
    log_mu = math.log(release.sample_rate) + (math.log(release.steps) + log_moment) / 2
    return math.exp(log_mu) if log_mu < 700 else math.inf
