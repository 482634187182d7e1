"""The curves of a privacy budget: epsilon by steps, noise by epsilon, and the cost of choosing among runs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from clipless import defaults
from clipless.accounting import ACCOUNTANTS, epsilon, noise_multiplier
from clipless.accounting.selection import METHODS, total
from clipless.app.charts.drawing import Chart, Line, number

STEP_POINTS = 16
EPSILONS = tuple(round(0.1 * 2 ** (k / 2), 3) for k in range(16))
GRID_SIZES = tuple(2**k for k in range(10))

Advance = Callable[[], None]


@dataclass(frozen=True)
class Budget:
    """A run whose steps are all alike, and an accountant."""

    noise_multiplier: float
    sample_rate: float
    steps: int
    delta: float
    accountant: str = defaults.ACCOUNTANT

    @property
    def epsilon(self) -> float:
        return epsilon(self.noise_multiplier, self.sample_rate, self.steps, self.delta, self.accountant)

    @property
    def guarantee(self) -> str:
        """The accountant, or pld if it only approximates: tuning is priced by guarantees alone."""
        return "pld" if ACCOUNTANTS[self.accountant].approximation else self.accountant

    def caption(self, *without: str) -> str:
        """The numbers that are the same along a curve, for its title."""
        parts = {"σ": f"{self.noise_multiplier:.4g}", "q": f"{self.sample_rate:.4g}", "T": f"{self.steps:,}"}
        return ", ".join(f"{key} = {value}" for key, value in parts.items() if key not in without)

    def points(self) -> dict[str, int]:
        """How many numbers each chart needs, for a progress bar."""
        return {
            "steps": len(ACCOUNTANTS) * len(_steps(self.steps)),
            "noise": len(ACCOUNTANTS) * len(EPSILONS),
            "tuning": len(METHODS) * len(GRID_SIZES),
        }


def curves(budget: Budget, advance: Advance = lambda: None) -> dict[str, Chart]:
    """All three, by name; `advance` is called after each number."""
    return {
        "steps": epsilon_by_steps(budget, advance),
        "noise": noise_by_epsilon(budget, advance),
        "tuning": cost_of_tuning(budget, advance),
    }


def epsilon_by_steps(budget: Budget, advance: Advance = lambda: None) -> Chart:
    """Epsilon spent as steps are taken, by each accountant."""
    z, rate, delta = budget.noise_multiplier, budget.sample_rate, budget.delta
    found = _by_accountant(_steps(budget.steps), lambda at, name: epsilon(z, rate, int(at), delta, name), advance)
    return Chart(
        title=f"Spent after so many steps ({budget.caption('T')})",
        x_label="steps",
        y_label=f"ε at δ = {number(delta)}",
        lines=found,
        point=(float(budget.steps), budget.epsilon, f"this run, by {budget.accountant}"),
    )


def noise_by_epsilon(budget: Budget, advance: Advance = lambda: None) -> Chart:
    """The noise that a run of this length needs for each epsilon, by each accountant."""
    rate, steps, delta = budget.sample_rate, budget.steps, budget.delta
    found = _by_accountant(EPSILONS, lambda target, name: noise_multiplier(target, delta, rate, steps, name), advance)
    return Chart(
        title=f"Noise that a target needs ({budget.caption('σ')})",
        x_label=f"target ε at δ = {number(delta)}",
        y_label="noise multiplier σ (noise / sensitivity)",
        lines=found,
        log_x=True,
        log_y=True,
        point=(budget.epsilon, budget.noise_multiplier, f"this run, by {budget.accountant}"),
    )


def cost_of_tuning(budget: Budget, advance: Advance = lambda: None) -> Chart:
    """The total epsilon of choosing the best among runs like this one, by each method, for grids of growing size."""
    alone = epsilon(budget.noise_multiplier, budget.sample_rate, budget.steps, budget.delta, budget.guarantee)

    def cost(candidates: float, method: str) -> float:
        return total(
            method,
            budget.noise_multiplier,
            budget.delta,
            int(candidates),
            budget.sample_rate,
            budget.steps,
            budget.guarantee,
        )

    found = []
    for method in METHODS:
        label = method + (" (all runs may be seen)" if METHODS[method].releases_all else " (the best run alone)")
        found.append(Line(label, tuple(map(float, GRID_SIZES)), _each(GRID_SIZES, method, cost, advance)))
    return Chart(
        title=f"Choosing the best of a grid ({budget.caption()}, {budget.guarantee})",
        x_label="candidates in the grid",
        y_label=f"ε in total at δ = {number(budget.delta)}",
        lines=tuple(found),
        log_x=True,
        log_y=True,
        level=(alone, "one run, nothing chosen"),
    )


def _steps(steps: int) -> tuple[int, ...]:
    return tuple(sorted({math.ceil(steps * k / STEP_POINTS) for k in range(1, STEP_POINTS + 1)}))


def _by_accountant(
    places: tuple[float, ...], value: Callable[[float, str], float], advance: Advance
) -> tuple[Line, ...]:
    return tuple(
        Line(
            accountant.name + (" (approximation, can under-report)" if accountant.approximation else ""),
            tuple(map(float, places)),
            _each(places, accountant.name, value, advance),
            approximate=accountant.approximation,
        )
        for accountant in ACCOUNTANTS.values()
    )


def _each(
    places: tuple[float, ...], name: str, value: Callable[[float, str], float], advance: Advance
) -> tuple[float, ...]:
    found = []
    for place in places:
        found.append(value(place, name))
        advance()
    return tuple(found)
