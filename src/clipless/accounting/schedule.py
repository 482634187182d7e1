"""Runs whose noise changes by a fixed schedule."""

from clipless import arguments
from clipless.accounting.accountants import accountant_named
from clipless.accounting.calibrate import noise_multiplier, search
from clipless.accounting.events import StepEvent
from clipless.noise_schedule import NoiseSchedule


def scheduled_epsilon(
    multiplier: float, sample_rate: float, schedule: NoiseSchedule, delta: float, accountant: str
) -> float:
    """The epsilon of a run whose steps have the noise multipliers `multiplier * relative`.

    >>> scheduled_epsilon(1.0, 0.01, [(1.0, 50), (0.5, 50)], 1e-5, "rdp") > scheduled_epsilon(
    ...     1.0, 0.01, [(1.0, 100)], 1e-5, "rdp"
    ... )
    True
    """
    z = arguments.usable_multiplier("noise_multiplier", multiplier)
    rate, allowed = arguments.rate(sample_rate), arguments.failure_probability(delta)
    events = [(StepEvent(rate, z * relative), steps) for relative, steps in schedule]
    return accountant_named(accountant).epsilon(events, allowed)


def scheduled_multiplier(
    epsilon: float, delta: float, sample_rate: float, schedule: NoiseSchedule, accountant: str
) -> float:
    """The smallest multiplier of a first step, relative 1, with which the whole schedule spends at most ε at δ."""
    if all(relative == 1 for relative, _ in schedule):
        return noise_multiplier(epsilon, delta, sample_rate, sum(count for _, count in schedule), accountant)

    def spent(z: float) -> float:
        return scheduled_epsilon(z, sample_rate, schedule, delta, accountant)

    start = 1.0 if accountant == "gdp" else scheduled_multiplier(epsilon, delta, sample_rate, schedule, "gdp")
    return search(spent, arguments.target_epsilon(epsilon), start)
