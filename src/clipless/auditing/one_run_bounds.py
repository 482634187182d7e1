"""What the number of right guesses about many canaries in one training says about epsilon.

Each of m canaries is put in or left out by a fair coin. An attacker guesses r of the coins and abstains on the others.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import special, stats

from clipless.accounting.gaussian import gaussian_epsilon
from clipless.errors import InvalidArgument

LARGEST_EPSILON = 60.0
LARGEST_MU = 30.0


def steinke_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The largest chance of at least this many right guesses under (epsilon, delta)-differential privacy.

    Steinke, Nasr, Jagielski (2023), theorem 5.2: the number of right guesses is below a binomial of r trials with
    chance e^ε/(1 + e^ε), but for an event that costs 2·m·δ·max_i P[v − i <= W < v]/i.
    """
    _check(canaries, guesses, right)
    chance = special.expit(epsilon)
    beyond = float(stats.binom.sf(right - 1, guesses, chance))
    if right == 0:
        return 1.0
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, chance))
    worst = float((below / np.arange(1, right + 1)).max())
    return min(1.0, beyond + 2 * canaries * delta * worst)


def steinke_epsilon(canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.95) -> float:
    """A lower bound on epsilon that holds with this confidence, whatever the mechanism.

    >>> round(steinke_epsilon(canaries=1000, guesses=1000, right=750, delta=0.0), 3)
    0.977
    """
    return _largest_refuted(
        lambda epsilon: steinke_p_value(canaries, guesses, right, epsilon, delta) < 1 - confidence, LARGEST_EPSILON
    )


def gaussian_refuted(canaries: int, guesses: int, right: int, mu: float, level: float) -> bool:
    """Whether so many right guesses have a chance below `level` under every mu-Gaussian differentially private mechanism.

    The recursion of Mahloujifar, Melis, Chaudhuri (2025) for the trade-off function f of N(0,1) against N(mu,1). Let p_j
    be the chance of j right guesses of r, R_i = Σ_{j>=i} j·p_j/m the share of right and H_i = Σ_{j>=i} (r−j)·p_j/m that of
    wrong ones. Flipping one coin turns a right guess into a wrong one and lowers j by one, so f-DP, averaged over coins
    and canaries by concavity, says R_{i+1} <= 1 − f(H_i), which is H_i >= Φ(Φ⁻¹(R_{i+1}) − mu). If P[j >= v] were `level`,
    then R_v >= level·v/m; going down from there R_i = R_{i+1} + i/(r−i)·(H_i − H_{i+1}) grows with every H, so equality
    gives the least R_0 + H_0, which must not be more than r/m. By convexity a higher level needs more still.
    """
    _check(canaries, guesses, right)
    if right == 0:
        return False
    ndtr, ndtri = special.ndtr, special.ndtri
    right_share, wrong_share = level * right / canaries, level * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        wrong = float(ndtr(ndtri(right_share) - mu))
        right_share += i / (guesses - i) * (wrong - wrong_share)
        wrong_share = wrong
        if right_share >= 1:
            return True
    return right_share + wrong_share > guesses / canaries


def gaussian_mu(canaries: int, guesses: int, right: int, confidence: float = 0.95) -> float:
    """A lower bound on mu that holds with this confidence for every mechanism that is mu-Gaussian differentially private.

    >>> round(gaussian_mu(canaries=1000, guesses=1000, right=750), 3)
    0.461
    """
    return _largest_refuted(lambda mu: gaussian_refuted(canaries, guesses, right, mu, 1 - confidence), LARGEST_MU)


def mahloujifar_epsilon(canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.95) -> float:
    """The epsilon at delta of the mu above: a lower bound if the mechanism's trade-off function is a Gaussian's."""
    return gaussian_epsilon(gaussian_mu(canaries, guesses, right, confidence), delta)


def _check(canaries: int, guesses: int, right: int) -> None:
    if not 0 <= right <= guesses <= canaries or canaries < 1:
        raise InvalidArgument(
            f"{right} right guesses of {guesses} about {canaries} canaries is impossible: each number is at most the next."
        )


def _largest_refuted(refuted: Callable[[float], bool], largest: float) -> float:
    """The largest value that is refuted, 0 if none is: rounded down, so that it is refuted itself."""
    low, high = 0.0, largest
    if not refuted(low):
        return 0.0
    while high - low > 1e-4 * max(1.0, low):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low if math.isfinite(low) else largest
