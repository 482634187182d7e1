"""Runs whose noise changes by a fixed schedule of stairs (relative multiplier, number of steps)."""

from collections.abc import Sequence

from clipless import arguments
from clipless.accounting.accountants import accountant_named
from clipless.accounting.calibrate import noise_multiplier, search
from clipless.accounting.events import StepEvent

Stairs = Sequence[tuple[float, int]]


def scheduled_epsilon(multiplier: float, sample_rate: float, stairs: Stairs, delta: float, accountant: str) -> float:
    """The epsilon of a run whose steps have the noise multipliers `multiplier * relative`.

    >>> scheduled_epsilon(1.0, 0.01, [(1.0, 50), (0.5, 50)], 1e-5, "rdp") > scheduled_epsilon(
    ...     1.0, 0.01, [(1.0, 100)], 1e-5, "rdp"
    ... )
    True
    """
    z = arguments.usable_multiplier("noise_multiplier", multiplier)
    rate, allowed = arguments.rate(sample_rate), arguments.failure_probability(delta)
    events = [(StepEvent(rate, z * relative), steps) for relative, steps in stairs]
    return accountant_named(accountant).epsilon(events, allowed)


def scheduled_multiplier(epsilon: float, delta: float, sample_rate: float, stairs: Stairs, accountant: str) -> float:
    """The smallest multiplier of a first step, relative 1, with which the whole schedule spends at most ε at δ."""
    if all(relative == 1 for relative, _ in stairs):
        return noise_multiplier(epsilon, delta, sample_rate, sum(count for _, count in stairs), accountant)

    def spent(z: float) -> float:
        return scheduled_epsilon(z, sample_rate, stairs, delta, accountant)

    start = 1.0 if accountant == "gdp" else scheduled_multiplier(epsilon, delta, sample_rate, stairs, "gdp")
    return search(spent, arguments.target_epsilon(epsilon), start)
