"""The number of runs: the distributions of Papernot and Steinke (2022), by mean and shape."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from clipless import arguments
from clipless.errors import InvalidArgument

LARGEST_MEAN = 1e7
# exp(-mean) must not underflow: a larger Poisson number is drawn as a sum.
LARGEST_POISSON = 500.0


@dataclass(frozen=True)
class Repetitions:
    """A random number of runs. `shape` 1 is geometric, 0 logarithmic, between and above truncated negative binomial
    (all at least 1); infinity is Poisson, which can be 0.

    >>> Repetitions(mean=20.0, shape=1.0).halting
    0.05
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        mean, shape = arguments.real("mean", self.mean), arguments.real("shape", self.shape)
        if not 1 <= mean <= LARGEST_MEAN:
            raise InvalidArgument(f"the mean number of runs must lie in [1, {LARGEST_MEAN:g}], got {mean:g}.")
        if shape < 0:
            raise InvalidArgument(
                f"shape must be 0 (logarithmic), 1 (geometric), another positive number or infinity, got {shape:g}."
            )
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "shape", shape)

    @property
    def halting(self) -> float:
        """The parameter γ in (0, 1] of a negative binomial with this mean: the smaller, the more runs."""
        if self.shape == 1 or self.mean == 1:
            return 1 / self.mean
        low, high = math.log(1e-300), -1e-12
        if self._excess(high) > 0:
            return 1.0
        from scipy.optimize import brentq  # slow to import, and needed for tuning alone

        return math.exp(float(brentq(self._excess, low, high, xtol=1e-14, rtol=1e-14)))

    def _excess(self, log_halting: float) -> float:
        """Logarithm of (the mean at this γ / the wanted mean)."""
        odds = math.log(-math.expm1(log_halting)) - log_halting  # log(1/γ - 1)
        if self.shape == 0:
            return odds - math.log(-log_halting) - math.log(self.mean)
        exponent = self.shape * log_halting
        return odds + math.log(self.shape) - math.log(-math.expm1(exponent)) - math.log(self.mean)

    def missing(self, chance: float) -> float:
        """The probability that an event of probability `chance` per run happens in no run: E[(1 - chance)^K].

        >>> round(Repetitions(mean=4.0).missing(0.5), 12)
        0.2
        """
        if self.shape == math.inf:
            return math.exp(-self.mean * chance)
        gamma = self.halting
        if gamma == 1:
            return 1 - chance
        kept = math.log1p(-(1 - gamma) * (1 - chance))  # log(1 - (1-γ)s), between log γ and 0
        if self.shape == 0:
            return kept / math.log(gamma)
        return math.expm1(-self.shape * kept) / math.expm1(-self.shape * math.log(gamma))

    def draw(self, rng: random.Random) -> int:
        """A number of runs; its distribution is exact up to the rounding of 53-bit numbers."""
        if self.shape == math.inf:
            parts = math.ceil(self.mean / LARGEST_POISSON)
            return sum(_inverse(rng.random(), _poisson(self.mean / parts), 0) for _ in range(parts))
        return _inverse(rng.random(), self.probabilities(), 1)

    def probabilities(self) -> Iterator[float]:
        """Of 1, 2, 3, ... runs (negative binomial), or of 0, 1, 2, ... (Poisson)."""
        return _poisson(self.mean) if self.shape == math.inf else self._negative_binomial()

    def _negative_binomial(self) -> Iterator[float]:
        gamma, eta = self.halting, self.shape
        if gamma == 1:
            chance = 1.0
        elif eta == 0:
            chance = -(1 - gamma) / math.log(gamma)
        else:
            chance = eta * (1 - gamma) / math.expm1(-eta * math.log(gamma))
        for k in count(1):
            yield chance
            chance *= (1 - gamma) * (k + eta) / (k + 1)


def _poisson(mean: float) -> Iterator[float]:
    chance = math.exp(-mean)
    for k in count():
        yield chance
        chance *= mean / (k + 1)


def _inverse(level: float, probabilities: Iterator[float], first: int) -> int:
    """The first number at which the probabilities, added up, exceed the level."""
    left = level
    for number, chance in enumerate(probabilities, first):
        left -= chance
        if left < 0 or chance < 1e-300:
            return number
    raise AssertionError("probabilities are endless")


def covering(candidates: int, coverage: float, shape: float) -> Repetitions:
    """The least mean at which the best of `candidates`, drawn uniformly, is run with probability `coverage`."""
    chance = 1 / candidates

    def lacking(log_mean: float) -> float:
        return Repetitions(math.exp(log_mean), shape).missing(chance) - (1 - coverage)

    if lacking(0.0) <= 0:
        return Repetitions(1.0, shape)
    high = math.log(LARGEST_MEAN) - 1e-9
    if lacking(high) > 0:
        raise InvalidArgument(
            f"a coverage of {coverage:g} of {candidates} candidates needs more than {LARGEST_MEAN:g} runs with shape "
            f"{shape:g}: take shape 1, a smaller coverage or a smaller grid."
        )
    from scipy.optimize import brentq

    return Repetitions(math.exp(float(brentq(lacking, 0.0, high, xtol=1e-12))), shape)
