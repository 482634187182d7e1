"""The event of repeat and select, by dp-accounting."""

import math

import dp_accounting
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant

from clipless.accounting.rdp import ROUNDING
from clipless.accounting.release import Release
from clipless.accounting.selection.repetitions import Repetitions
from clipless.arrays import Floats


def epsilon_and_order(
    kind: tuple[Release, ...], surcharge: float, repetitions: Repetitions, orders: Floats, delta: float
) -> tuple[float, float]:
    """The least epsilon over these orders of choosing among runs of this kind, and its order.

    `surcharge` is added to the divergence of a run at every order.
    """
    accountant = RdpAccountant(orders)
    accountant.compose(RepeatAndSelectDpEvent(_event(kind, surcharge), repetitions.mean, repetitions.shape))
    epsilon, order = accountant.get_epsilon_and_optimal_order(delta)
    return (math.inf if math.isnan(epsilon) else float(epsilon)), float(order)


def _event(kind: tuple[Release, ...], surcharge: float) -> dp_accounting.DpEvent:
    steps = sum(release.steps for release in kind)
    if any(release.projections for release in kind):
        return dp_accounting.NonPrivateDpEvent()
    return dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(sampled_gaussian(r.sample_rate, r.noise_multiplier), r.steps) for r in kind]
        + [dp_accounting.ZCDpEvent(rho=0.0, xi=ROUNDING * steps + surcharge)]
    )


def sampled_gaussian(sample_rate: float, noise_multiplier: float) -> dp_accounting.DpEvent:
    """A Gaussian release on a Poisson batch, as an event of dp-accounting: not private without noise, nothing with infinite
    noise."""
    if noise_multiplier == 0:
        return dp_accounting.NonPrivateDpEvent()
    if noise_multiplier == math.inf:
        return dp_accounting.NoOpDpEvent()
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    return gaussian if sample_rate == 1 else dp_accounting.PoissonSampledDpEvent(sample_rate, gaussian)
