"""The price of tuning: from a total to the noise of a single run, and back."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from clipless import arguments, defaults
from clipless.accounting.calibrate import OutOfReach, search
from clipless.accounting.events import StepEvent
from clipless.accounting.schedule import scheduled_multiplier
from clipless.accounting.selection.grid_search import GridSearch
from clipless.accounting.selection.liu_talwar import LiuTalwar
from clipless.accounting.selection.method import Run, SelectionMethod, guarantee
from clipless.accounting.selection.papernot_steinke import PapernotSteinke
from clipless.arguments import named, whole
from clipless.errors import InvalidArgument
from clipless.noise_schedule import NoiseSchedule
from clipless.rounding import rounded_up

METHODS: Mapping[str, type[SelectionMethod]] = MappingProxyType(
    {method.name: method for method in (LiuTalwar, PapernotSteinke, GridSearch)}
)
AUTO = "auto"
# A target that needs more than this many times the noise of an untuned run is out of reach.
MOST_NOISE = 1e6


@dataclass(frozen=True)
class RunShape:
    """A run without its noise multiplier: `schedule` has (relative noise multiplier, steps), in order.

    >>> RunShape.of(sample_rate=0.1, steps=20).run(2.0)
    ((StepEvent(sample_rate=0.1, gradient_multiplier=2.0, statistic_multipliers=(), projections=None), 20),)
    """

    sample_rate: float
    schedule: tuple[tuple[float, int], ...]

    @classmethod
    def of(cls, sample_rate: float, steps: int, schedule: NoiseSchedule | None = None) -> "RunShape":
        """A run of `steps` steps, all alike or by a schedule."""
        parts = ((1.0, arguments.step_count(steps)),) if schedule is None else tuple(schedule)
        return cls(arguments.rate(sample_rate), parts)

    def run(self, noise_multiplier: float) -> Run:
        """What the run releases when its first step has this noise."""
        return tuple((StepEvent(self.sample_rate, noise_multiplier * rel), count) for rel, count in self.schedule)


@dataclass(frozen=True)
class SingleRun:
    """The budget of one run, such that choosing among all of them stays within the total (`epsilon`, `delta`).

    `noise_multipliers` has the first step's noise of each candidate; `run_epsilon` and `run_delta` are the largest that
    one run alone spends. `spent` is the total recomputed from the noise: at most `epsilon`, and within 1 % of it unless
    the accountant jumps there.
    """

    method: SelectionMethod
    epsilon: float
    delta: float
    accountant: str
    spent: float
    run_epsilon: float
    run_delta: float
    noise_multipliers: tuple[float, ...]
    explanation: str = ""

    @property
    def noise_multiplier(self) -> float:
        """The noise of a run; the geometric mean where candidates differ in length or batch size."""
        if len(set(self.noise_multipliers)) == 1:
            return self.noise_multipliers[0]
        return math.exp(math.fsum(map(math.log, self.noise_multipliers)) / len(self.noise_multipliers))

    @property
    def expected_runs(self) -> float:
        return self.method.expected_runs

    @property
    def most_runs(self) -> int | None:
        return self.method.most_runs

    @property
    def coverage(self) -> float:
        return self.method.coverage


def method_named(name: str, candidates: int, coverage: float | None = None) -> SelectionMethod:
    """The registered method for a grid of that size; an unknown name raises with the nearest known one."""
    return named("selection method", name, METHODS).covering(whole("candidates", candidates), coverage)


def total(
    method: str | SelectionMethod,
    noise_multiplier: float,
    delta: float,
    candidates: int,
    sample_rate: float,
    steps: int,
    accountant: str = defaults.ACCOUNTANT,
    coverage: float | None = None,
) -> float:
    """The epsilon of choosing the best among identical runs with this noise.

    >>> round(total("grid", 2.0, 1e-5, candidates=4, sample_rate=0.01, steps=250), 2)
    0.62
    """
    chosen = method_named(method, candidates, coverage) if isinstance(method, str) else method
    z = arguments.usable_multiplier("noise_multiplier", noise_multiplier)
    run = RunShape.of(sample_rate, steps).run(z)
    return chosen.epsilon([run] * chosen.candidates, arguments.failure_probability(delta), guarantee(accountant))


def single_run(
    method: str | SelectionMethod,
    epsilon: float,
    delta: float,
    candidates: int,
    sample_rate: float,
    steps: int,
    accountant: str = defaults.ACCOUNTANT,
    coverage: float | None = None,
) -> SingleRun:
    """The budget of one run, for candidates that are alike in batch size and steps. `method` can be "auto".

    >>> tuned = single_run("papernot-steinke", 3.0, 1e-5, candidates=10, sample_rate=0.01, steps=1000)
    >>> 2.97 <= tuned.spent <= 3.0
    True
    """
    shapes = [RunShape.of(sample_rate, steps)] * whole("candidates", candidates)
    return price(method, epsilon, delta, shapes, accountant, coverage)


def price(
    method: str | SelectionMethod,
    epsilon: float,
    delta: float,
    shapes: Sequence[RunShape],
    accountant: str = defaults.ACCOUNTANT,
    coverage: float | None = None,
) -> SingleRun:
    """The budget of one run, for candidates of any shapes. `method="auto"` takes the one with the least noise."""
    if method == AUTO:
        return cheapest(prices(epsilon, delta, shapes, accountant, coverage))
    chosen = method_named(method, len(shapes), coverage) if isinstance(method, str) else method
    if chosen.candidates != len(shapes):
        raise InvalidArgument(f"{chosen} is made for {chosen.candidates} candidates, the grid has {len(shapes)}.")
    target, failure = arguments.target_epsilon(epsilon), arguments.failure_probability(delta)
    alone = {shape: _alone(chosen, shape, target, failure, guarantee(accountant)) for shape in dict.fromkeys(shapes)}

    def spent(scale: float) -> float:
        runs = [shape.run(scale * alone[shape]) for shape in shapes]
        return chosen.epsilon(runs, failure, accountant)

    scale = search(_bounded(spent, chosen, failure), target, start=1.0) if len(alone) > 1 else 1.0
    noise = tuple(scale * alone[shape] for shape in shapes)
    budgets = {shape: chosen.run_budget(shape.run(scale * z), failure, accountant) for shape, z in alone.items()}
    run_epsilon, run_delta = max(budgets.values())
    priced = SingleRun(chosen, target, failure, accountant, spent(scale), run_epsilon, run_delta, noise)
    return replace(priced, explanation=_sentence(priced))


def prices(
    epsilon: float,
    delta: float,
    shapes: Sequence[RunShape],
    accountant: str = defaults.ACCOUNTANT,
    coverage: float | None = None,
) -> tuple[SingleRun, ...]:
    """The budget of one run by every method that can stay within the total, at the same coverage unless one is given."""
    found: list[SingleRun] = []
    refused: InvalidArgument | None = None
    for name in METHODS:
        try:
            found.append(price(name, epsilon, delta, shapes, accountant, coverage))
        except OutOfReach as error:
            refused = error
    if not found and refused:
        raise refused
    return tuple(found)


def cheapest(priced: Sequence[SingleRun]) -> SingleRun:
    """The price whose runs get the least noise, the one with the greater coverage on a tie. Its explanation has the figures
    of all.
    """
    best = min(priced, key=lambda one: (one.noise_multiplier, -one.coverage))
    figures = "; ".join(_figures(one) for one in sorted(priced, key=lambda one: one.noise_multiplier))
    return replace(
        best, explanation=f"{best.method.name} needs the least noise for the same total. {figures}. {best.explanation}"
    )


def _alone(method: SelectionMethod, shape: RunShape, target: float, delta: float, accountant: str) -> float:
    """The least noise if all candidates had this shape."""
    untuned = scheduled_multiplier(target, delta, shape.sample_rate, shape.schedule, accountant)

    def spent(scale: float) -> float:
        return method.epsilon([shape.run(scale * untuned)] * method.candidates, delta, accountant)

    return untuned * search(_bounded(spent, method, delta), target, start=1.5)


def _bounded(spent: Callable[[float], float], method: SelectionMethod, delta: float) -> Callable[[float], float]:
    def bounded(scale: float) -> float:
        if scale > MOST_NOISE:
            raise OutOfReach(
                f"no amount of noise keeps {method.name} within this total at delta={delta:g}: choose a larger epsilon "
                "or delta, fewer candidates, or another method."
            )
        return spent(scale)

    return bounded


def _figures(priced: SingleRun) -> str:
    return (
        f"{priced.method.name}: noise {priced.noise_multiplier:.4g}, {priced.expected_runs:.4g} runs on average, best "
        f"candidate tried with chance {priced.coverage:.0%}"
    )


def _sentence(priced: SingleRun) -> str:
    shown = "all runs may be seen" if priced.method.releases_all else "only the best run may be seen"
    return (
        f"Each run spends at most ({rounded_up(priced.run_epsilon)}, {rounded_up(priced.run_delta)}) alone; choosing by "
        f"{priced.method.name} costs ({rounded_up(priced.spent)}, {rounded_up(priced.delta)}) in total, and {shown}."
    )
