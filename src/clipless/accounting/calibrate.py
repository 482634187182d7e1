"""Calibration: the least noise that keeps a run within (epsilon, delta)."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from clipless import arguments, defaults
from clipless.accounting.accountants import accountant_named
from clipless.accounting.accountants import epsilon as epsilon_of
from clipless.errors import InvalidArgument

LEAST_MULTIPLIER = 1e-3
TOLERANCE = 0.008
# Targets that need more noise than this are out of reach.
MOST_MULTIPLIER = 1e18
# Trials by secant before the search falls back to halving its bracket, or to strides where it has none.
PATIENCE = 8
# Two multipliers this close count as the same: between them the accountant's epsilon jumps.
SAME = 1 + 1e-4
STRIDE = 8


class OutOfReach(InvalidArgument):
    """No amount of noise meets the target."""


def noise_multiplier(
    epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = defaults.ACCOUNTANT,
    projections: int | None = None,
) -> float:
    """The smallest noise multiplier with which `steps` steps spend at most (epsilon, delta). `projections` are those of
    `gradients="jl"`.

    Guarantee: `clipless.epsilon` of the result is at most `epsilon`, and at least 99 % of it. One exception: if delta
    exceeds the probability that a record is ever sampled, "pld" accepts any noise and `LEAST_MULTIPLIER` is returned; choose
    a smaller delta then. Raises `OutOfReach`, an `InvalidArgument`, if not even `MOST_MULTIPLIER` is enough.

    >>> z = noise_multiplier(epsilon=3.0, delta=1e-5, sample_rate=0.01, steps=1000)
    >>> 2.97 < epsilon_of(z, sample_rate=0.01, steps=1000, delta=1e-5) <= 3.0
    True
    """
    return _noise_multiplier(
        arguments.target_epsilon(epsilon),
        arguments.failure_probability(delta),
        arguments.rate(sample_rate),
        arguments.step_count(steps),
        accountant_named(accountant).name,
        projections,
    )


@lru_cache(maxsize=1024)
def _noise_multiplier(
    target: float, delta: float, rate: float, steps: int, accountant: str, projections: int | None = None
) -> float:
    def spent(z: float) -> float:
        return epsilon_of(z, rate, steps, delta, accountant, projections)

    start = 1.0 if accountant == "gdp" else _noise_multiplier(target, delta, rate, steps, "gdp")
    return search(spent, target, start)


class _Trial(NamedTuple):
    z: float
    epsilon: float


def search(spent: Callable[[float], float], target: float, start: float) -> float:
    """Bracket the target and close in on it from the safe side. The result was tried and meets the target.

    A NaN epsilon never meets it.
    """
    aim = target * (1 - TOLERANCE / 4)
    trials: list[_Trial] = []
    too_little, enough = 0.0, math.inf
    z = max(start, LEAST_MULTIPLIER)
    while True:
        trial = _Trial(z, spent(z))
        trials.append(trial)
        if trial.epsilon <= target:
            enough = z
            if trial.epsilon >= target * (1 - TOLERANCE) or z == LEAST_MULTIPLIER:
                return z
        else:
            too_little = z
            if z >= MOST_MULTIPLIER:
                raise OutOfReach(
                    f"no noise multiplier up to {MOST_MULTIPLIER:g} brings epsilon down to {target:g}: choose a larger "
                    "epsilon or delta, or fewer steps."
                )
        if enough <= too_little * SAME:
            return enough
        z = max(_next(trials, aim, too_little, enough), LEAST_MULTIPLIER)


def _next(trials: list[_Trial], aim: float, too_little: float, enough: float) -> float:
    """The multiplier to try next: by secant, kept inside the bracket, or one stride away while there is no bracket."""
    z = _secant(trials, aim)
    patient = len(trials) <= PATIENCE
    if too_little == 0:
        return min(max(z, enough / STRIDE), enough / (1.01 if patient else STRIDE))
    if enough == math.inf:
        return max(min(z, too_little * STRIDE), too_little * (1.01 if patient else STRIDE))
    if not patient or not too_little < z < enough:
        return math.sqrt(too_little * enough)
    return z


def _secant(trials: list[_Trial], aim: float) -> float:
    """Where the line through the two trials nearest to the target meets it, in logarithms; with one trial, slope -3/2."""
    usable = [trial for trial in trials if 0 < trial.epsilon < math.inf]
    if not usable:
        return 0.0 if trials[-1].epsilon == 0 else math.inf
    nearest, *others = sorted(usable, key=lambda trial: abs(math.log(trial.epsilon / aim)))
    slope = -1.5
    if others and others[0].epsilon != nearest.epsilon:
        slope = math.log(others[0].epsilon / nearest.epsilon) / math.log(others[0].z / nearest.z)
    step = math.log(aim / nearest.epsilon) / (slope if slope < 0 else -1.5)
    return nearest.z * math.exp(min(max(step, -3.0), 3.0))
