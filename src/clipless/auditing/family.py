"""The mechanisms that a claim is about: Gaussian releases on Poisson batches, of any noise multiplier.

A claim names one of them. The largest noise multiplier that still allows an attack's error rates is a bound of the same
kind, so a bound and a claim can be compared at any delta.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from scipy import special

from clipless.accounting import ACCOUNTANTS, StepEvent
from clipless.arrays import Floats

EPSILONS = np.concatenate([[0.0], np.geomspace(0.01, 40, 80)])
LESS, MORE = 8.0, 64.0
TOLERANCE = 1e-3
# The interval of the grid of privacy losses, and its least share of the loss of a step with multiplier 1: with little noise
# losses are large, and a finer grid would gain nothing.
INTERVAL, OF_LOSS = 5e-3, 2e-4


@dataclass(frozen=True)
class SampledGaussian:
    """`steps` Gaussian releases, each on a Poisson batch of this rate, of a record with the largest gradient allowed."""

    sample_rate: float = 1.0
    steps: int = 1

    def epsilon(self, noise_multiplier: float, delta: float, accountant: str = "pld") -> float:
        """The accountant's epsilon for such releases; 0 for infinite noise, infinite without noise."""
        if noise_multiplier <= 0:
            return math.inf
        return ACCOUNTANTS[accountant].epsilon(((StepEvent(self.sample_rate, noise_multiplier), self.steps),), delta)

    def noise_multiplier(self, fpr: float, fnr: float, near: float = 1.0) -> float:
        """The largest noise multiplier that allows a test with these error rates, rounded up; infinite if they are no better
        than guessing, 0 if even without noise the record would be missed more often, because no batch contains it.
        For several sampled steps the search goes from `near / LESS` to `near * MORE`."""
        if self.steps == 1 or self.sample_rate == 1:
            mu = float(self.separation(np.array(fpr), np.array(fnr)))
            return math.inf if mu <= 0 else math.sqrt(self.steps) / mu
        if fpr + fnr >= 1:
            return math.inf
        if fnr < (1 - self.sample_rate) ** self.steps * (1 - fpr):
            return 0.0
        low, high = near / LESS, near * MORE
        if not self._allows(low, fpr, fnr):
            return low
        if self._allows(high, fpr, fnr):
            return high
        while high / low > 1 + TOLERANCE:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._allows(middle, fpr, fnr) else (low, middle)
        return high

    def separation(self, fpr: Floats, fnr: Floats) -> Floats:
        """How many standard deviations the record moves a release in which it takes part, by these error rates.

        With rate q a test that errs with rate a on data without the record misses it at least with rate
        (1 − q)·(1 − a) + q·Φ(Φ⁻¹(1 − a) − μ). Solved for μ; infinite if the record is missed less often than it is left
        out. Exact for one step and for full batches, otherwise only a figure of merit.
        """
        q = self.sample_rate if self.steps == 1 else 1.0
        with np.errstate(divide="ignore", invalid="ignore"):
            missed = (fnr - (1 - q) * (1 - fpr)) / q
            mu = special.ndtri(1 - fpr) - special.ndtri(np.clip(missed, 0.0, 1.0))
        return np.where(fpr + fnr >= 1, 0.0, np.where(missed <= 0, np.inf, mu))

    def _allows(self, noise_multiplier: float, fpr: float, fnr: float) -> bool:
        deltas = _profile(self.sample_rate, self.steps, round(noise_multiplier, 9))
        with np.errstate(over="ignore"):
            needed = np.maximum(1 - fnr - np.exp(EPSILONS) * fpr, 1 - fpr - np.exp(EPSILONS) * fnr)
        return bool((needed <= deltas).all())


@lru_cache(maxsize=256)
def _profile(sample_rate: float, steps: int, noise_multiplier: float) -> Floats:
    """Upper bounds on delta at `EPSILONS`, by dp-accounting itself and not by the code that made the claim."""
    interval = max(INTERVAL, OF_LOSS / noise_multiplier**2)
    one = privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sample_rate, value_discretization_interval=interval
    )
    return np.asarray(one.self_compose(steps).get_delta_for_epsilon(EPSILONS), dtype=np.float64)
