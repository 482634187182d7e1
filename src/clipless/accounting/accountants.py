"""From what was released to epsilon: three accountants in one registry."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from clipless import arguments, defaults
from clipless.accounting.events import StepEvent
from clipless.accounting.gdp import gdp_epsilon
from clipless.accounting.pld import pld_epsilon
from clipless.accounting.rdp import rdp_epsilon
from clipless.accounting.release import Release, coarser, releases
from clipless.arguments import named
from clipless.errors import InvalidArgument

NO_NOISE, MOST_NOISE = arguments.SMALLEST, arguments.LARGEST
MAX_RELEASES = 64
APPROXIMATION_NOTE = "gdp is an approximation and may understate epsilon; pld and rdp are guarantees."


@dataclass(frozen=True)
class Accountant:
    """A method of computing epsilon. With `approximation`, the true epsilon can be larger than the one returned."""

    name: str
    approximation: bool
    bound: Callable[[tuple[Release, ...], float], float]
    takes_projections: bool = False

    def epsilon(self, events: Sequence[tuple[StepEvent, int]], delta: float) -> float:
        """Epsilon at delta after each event happened `count` times; 0 for no events, infinite if one had no noise.

        Noise below `NO_NOISE` counts as no noise, noise above `MOST_NOISE` as `MOST_NOISE`. A delta below
        `arguments.LEAST_DELTA` has no finite epsilon. More than `MAX_RELEASES` different steps are rounded to that many,
        each to a costlier one: by at most 1 % in noise if the noise changes by a factor of 2 over the run.
        """
        spent = coarser(
            tuple(r._replace(noise_multiplier=min(r[1], MOST_NOISE)) for r in releases(events)), MAX_RELEASES
        )
        if not spent:
            return 0.0
        if not self.takes_projections and any(release.projections for release in spent):
            raise InvalidArgument(
                f"{self.name} cannot account for norms that are estimated by random projections: the sensitivity of such a "
                "step has no bound, so its Rényi divergences and the moments of its loss are infinite. Use accountant='pld'."
            )
        if delta < arguments.LEAST_DELTA or any(release.noise_multiplier < NO_NOISE for release in spent):
            return math.inf
        return _epsilon(self, spent, delta)


@lru_cache(maxsize=4096)
def _epsilon(accountant: Accountant, spent: tuple[Release, ...], delta: float) -> float:
    bound = float(accountant.bound(spent, delta))
    return math.inf if math.isnan(bound) else max(0.0, bound)


ACCOUNTANTS: Mapping[str, Accountant] = MappingProxyType(
    {
        "pld": Accountant("pld", approximation=False, bound=pld_epsilon, takes_projections=True),
        "rdp": Accountant("rdp", approximation=False, bound=rdp_epsilon),
        "gdp": Accountant("gdp", approximation=True, bound=gdp_epsilon),
    }
)


def accountant_named(name: str) -> Accountant:
    """The registered accountant of that name; an unknown name raises with the nearest known one."""
    return named("accountant", name, ACCOUNTANTS)


def epsilon(
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str = defaults.ACCOUNTANT,
    projections: int | None = None,
) -> float:
    """What `steps` steps of DP-SGD spend at `delta`, with Poisson batches, for one record that becomes empty, or, at a rate
    that does not follow from the number of records, for one that is added or removed.

    "pld" (tight) and "rdp" are upper bounds. "gdp" is an approximation that can under-report. Numbers too small or too
    large to compute with are refused: `clipless.arguments` has the limits. `projections` are those of `gradients="jl"`.

    >>> round(epsilon(noise_multiplier=1.1, sample_rate=0.01, steps=1000, delta=1e-5), 2)
    1.52
    """
    z = arguments.usable_multiplier("noise_multiplier", noise_multiplier)
    event = StepEvent(arguments.rate(sample_rate), z, (), projections)
    count = arguments.step_count(steps)
    return accountant_named(accountant).epsilon(((event, count),), arguments.failure_probability(delta))
