"""AUTO's figures 5-10 and Theorem 5: bounds and what they are made of."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from clipless.app.reproduce.drawing import curve, dress, panels
from clipless.theory.auto_bounds import (
    alignment,
    auto_s_bound,
    auto_v_bound,
    concave_inverse,
    inverse_measure,
    least_alignment,
    measure,
    measure_limit,
)
from clipless.theory.auto_laws import ProblemConstants, best_learning_rate, cost_of_rate, private_bound

XI, GAMMA, TERM, SGD_TERM = 25.0, 0.01, 10.0, 2.0
STEPS = np.geomspace(1, 1e10, 81)
LONG = np.geomspace(1, 1e14, 57)


def bounds_over_steps() -> Any:
    """Figure 5: each ratio r gives a bound; AUTO-S takes ever larger ones, AUTO-V none above 1."""
    figure, (left, middle, right) = panels(3)
    terms = TERM / np.sqrt(STEPS)
    for number, r in enumerate((1.0, 1.5, 2.0, 4.0)):
        curve(left, number, STEPS, XI / r + inverse_measure(terms, r, XI, GAMMA), f"r = {r:g}")
    curve(left, 6, STEPS, [auto_s_bound(t, XI, GAMMA) for t in terms], "least over r", linewidth=2.5, linestyle="-")
    left.set_ylim(0, 80)
    for number, r in enumerate((0.3, 0.5, 0.8, 0.95)):
        curve(middle, number, STEPS, XI / r + terms / least_alignment(r), f"r = {r:g}")
    curve(middle, 6, STEPS, [auto_v_bound(t, XI) for t in terms], "least over r", linewidth=2.5, linestyle="-")
    middle.axhline(XI, color="0.4", linewidth=1, label="ξ")
    middle.set_ylim(0, 170)
    _compared(right, STEPS)
    dress(left, "AUTO-S: bound on ‖g‖", "steps T", "bound", "x")
    dress(middle, "AUTO-V: never below ξ = 25", "steps T", "bound", "x")
    dress(right, "beside SGD without privacy", "steps T", "bound", "xy")
    return figure


def _compared(axes: Any, steps: Any) -> None:
    curve(axes, 0, steps, [auto_s_bound(TERM / math.sqrt(t), XI, GAMMA) for t in steps], "AUTO-S")
    curve(axes, 1, steps, [auto_v_bound(TERM / math.sqrt(t), XI) for t in steps], "AUTO-V")
    curve(axes, 2, steps, np.sqrt(SGD_TERM / np.sqrt(steps)), "SGD")


def rates_in_the_long_run() -> Any:
    """Figure 8, carried on to T = 10¹⁴, where the slope is reached."""
    figure, (left, right) = panels(2)
    _compared(left, LONG)
    late = np.geomspace(1e10, 1e14, 2)
    curve(
        left, 6, late, 2 * auto_s_bound(TERM / 1e5, XI, GAMMA) * (late / late[0]) ** -0.25, "slope −1/4", linestyle=":"
    )
    dress(left, "ξ = 25, γ = 0.01", "steps T", "bound", "xy")
    curve(right, 0, LONG, [auto_s_bound(TERM / math.sqrt(t), 1.0, GAMMA) for t in LONG], "(C.8) itself")
    some = LONG[::4]
    for number, longest in enumerate((3.0, 30.0), 1):
        bounds = [auto_s_bound(TERM / math.sqrt(t), 1.0, GAMMA, longest) for t in some]
        curve(right, number, some, bounds, f"concave envelope, ‖g‖ ≤ {longest:g}")
    for slope, start, name in ((-0.25, 0.1, "slope −1/4"), (-1 / 6, 1.0, "slope −1/6")):
        curve(right, 6, late, start * (late / late[0]) ** slope, name, linestyle=":" if slope == -0.25 else "--")
    dress(right, "ξ = 1: the inverse and its concave envelope", "steps T", "bound", "xy", "lower left")
    return figure


def bound_over_term() -> Any:
    """Figure 6: ξ/r + F over the term of order 1/√T, at ξ = 1; on the right the part near zero, with larger ratios."""
    figure, (left, right) = panels(2)
    for axes, end, ratios in ((left, 0.02, (1.5, 2.0, 5.0)), (right, 0.001, (1.5, 2.0, 5.0, 10.0, 20.0))):
        terms = np.linspace(0, end, 800)
        for number, r in enumerate((0.5, 0.9)):
            curve(axes, number, terms, 1 / r + terms / least_alignment(r), f"AUTO-V, r = {r:g}")
        for number, r in enumerate(ratios, 2):
            curve(axes, number, terms, 1 / r + inverse_measure(terms, r, 1.0, GAMMA), f"AUTO-S, r = {r:g}")
        axes.axhline(1, color="0.4", linewidth=1, label="ξ")
        axes.set_ylim(0, 4.5)
    dress(left, "ξ/r + F, ξ = 1, γ = 0.01", "term, of order 1/√T", "bound on ‖g‖", legend="upper right")
    dress(right, "near zero", "term, of order 1/√T", "bound on ‖g‖", legend="upper center")
    return figure


def measure_and_inverse() -> Any:
    """(C.3) and (C.8): M, its inverse, and the inverse's concave envelope, at ξ = 1."""
    figure, (left, middle, right) = panels(3)
    x = np.linspace(0, 10, 400)
    for number, r in enumerate((1.1, 1.5, 2.0, 4.0)):
        limit = measure_limit(r, GAMMA)
        curve(left, number, x, measure(x, r, 1.0, GAMMA), f"r = {r:g}")
        y = np.linspace(0, limit * 0.995, 600)
        curve(middle, number, y, inverse_measure(y, r, 1.0, GAMMA), f"r = {r:g}")
    middle.set_ylim(0, 10)
    y = np.linspace(0, measure_limit(1.5, GAMMA) * 0.9999, 2000)
    curve(right, 6, y, inverse_measure(y, 1.5, 1.0, GAMMA), "(C.8)", linestyle="-")
    for number, longest in enumerate((3.0, 6.0, 10.0)):
        curve(right, number, y, concave_inverse(y, 1.5, 1.0, GAMMA, longest), f"envelope for ‖g‖ ≤ {longest:g}")
    right.set_ylim(0, 10)
    dress(left, "M(x), ξ = 1, γ = 0.01", "x = ‖g‖ − ξ/r", "M", "y")
    dress(middle, "its inverse (C.8)", "M", "x", legend="upper center")
    dress(right, "concave envelope of the inverse, r = 1.5", "M", "x", legend="upper left")
    return figure


def noise_and_stability() -> Any:
    """Figure 7: the bound for several ξ at γ = 0.01, and for several γ at ξ = 1."""
    figure, (left, right) = panels(2)
    for number, xi in enumerate((0.1, 1.0, 10.0, 100.0)):
        curve(left, number, STEPS, [auto_s_bound(TERM / math.sqrt(t), xi, GAMMA) for t in STEPS], f"ξ = {xi:g}")
    for number, gamma in enumerate((1e-4, 0.01, 0.1, 1.0, 10.0)):
        curve(right, number, STEPS, [auto_s_bound(TERM / math.sqrt(t), 1.0, gamma) for t in STEPS], f"γ = {gamma:g}")
    dress(left, "AUTO-S, γ = 0.01", "steps T", "bound", "xy")
    dress(right, "AUTO-S, ξ = 1", "steps T", "bound", "xy")
    return figure


def alignment_over_noise() -> Any:
    """Figure 9: f(½, S; Γ), and its minimum over the angle, against S, the noise of a pair of gradients."""
    figure, (left, right) = panels(2)
    s = np.linspace(0, 4, 401)
    for number, gamma in enumerate((0.0, 0.01, 0.1, 0.5, 1.0)):
        curve(left, number, s, alignment(0.5, s, gamma), f"Γ = {gamma:g}")
        curve(right, number, s, [least_alignment(float(each), gamma) for each in s], f"Γ = {gamma:g}")
    dress(left, "f(½, S; Γ): what a pair g ± Δ gains", "S = ‖Δ‖/‖g‖", "f")
    dress(right, "least f(c, S; Γ) over 0 < c ≤ 1", "S = ‖Δ‖/‖g‖", "f")
    return figure


def alignment_over_angle() -> Any:
    """Figure 10: f(c, r; Γ) against c, below and above r = 1."""
    figure, axes = panels(2)
    c = np.linspace(0, 1, 401)[:-1]
    for place, r in zip(axes, (0.8, 2.0), strict=True):
        for number, gamma in enumerate((0.0, 0.01, 0.1, 1.0)):
            curve(place, number, c, alignment(c, r, gamma), f"Γ = {gamma:g}")
        place.set_ylim(bottom=0)
        dress(place, f"f(c, {r:g}; Γ)", "c, the cosine between g and Δ", "f")
    return figure


def laws() -> Any:
    """Theorem 5: steps, batch and start at a fixed budget; the best learning rate."""
    figure, (left, middle, right) = panels(3)
    constants, steps = ProblemConstants(), np.geomspace(10, 1e6, 41)
    for number, batch in enumerate((64, 512, 4096)):
        curve(left, number, steps, [private_bound(constants, t, batch, 1.0) for t in steps], f"B = {batch:,}")
    near = replace(constants, loss_gap=constants.loss_gap / 10)
    starts = {
        "from scratch": constants,
        "loss gap / 10": near,
        "loss gap and ξ / 10": replace(near, xi=constants.xi / 10),
    }
    for number, (name, start) in enumerate(starts.items()):
        curve(middle, number, steps, [private_bound(start, t, 512, 1.0) for t in steps], name)
    rates = np.geomspace(1e-2, 10, 200)
    for number, t in enumerate((100.0, 1e5, 1e6)):
        curve(right, number, rates, [cost_of_rate(constants, t, rate) for rate in rates], f"T = {t:,.0f}")
        best = best_learning_rate(constants, t)
        right.plot(
            [best], [cost_of_rate(constants, t, best)], marker="*", markersize=11, color="black", linestyle="none"
        )
    dress(left, "more steps, larger batches (1-GDP, γ = 1)", "steps T", "bound on ‖g‖", "xy")
    dress(middle, "a better start, B = 512", "steps T", "bound on ‖g‖", "xy")
    dress(right, "learning rate η₀; stars: the formula", "η₀", "√T × mean gain", "xy")
    return figure
