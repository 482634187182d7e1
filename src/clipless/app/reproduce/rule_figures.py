"""AUTO's figures 2, 3, 4 and 11: directions, norms and lazy regions of the clipping rules."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from clipless.app.charts.drawing import COLOURS
from clipless.app.reproduce.drawing import curve, dress, panels
from clipless.theory import directions, lazy_regions, rules
from clipless.theory.rules import ArrayRule

COUNT, DIMENSION, SPREAD = 1000, 400, 1.0
COMPARED: dict[str, ArrayRule] = rules.named_rules(gamma=0.01, cutoff=2.0)


def directions_of_rules() -> Any:
    """Figure 2, on gradients g + Δ: the share of the best progress, and the distance from the best factors."""
    figure, (left, middle, right) = panels(3)
    noises = np.geomspace(0.1, 100, 16)
    samples = [directions.sample_gradients(COUNT, DIMENSION, float(noise), SPREAD) for noise in noises]
    for number, (name, rule) in enumerate(COMPARED.items()):
        name = f"{name}, Z = 2" if name == "global" else name
        curve(middle, number, noises, [directions.distance_from_best(g, rule) for g in samples], name)
        made = [directions.progress(g, rule(np.linalg.norm(g, axis=1), 1.0)) for g in samples]
        curve(right, number, noises, made, name)
    for number, noise in enumerate((1.0, 10.0, 100.0)):
        gradients = directions.sample_gradients(COUNT, DIMENSION, noise, SPREAD)
        total = np.linalg.norm(gradients.sum(0)) * np.linalg.norm(gradients, axis=1)
        cosines, share = directions.dot_products(gradients) / total, np.full(COUNT, 1 / COUNT)
        bins = np.linspace(-0.1, 0.9, 51)
        label = f"‖Δ‖/‖g‖ = {noise:g}: {(cosines > 0).mean():.0%} positive"
        left.hist(cosines, bins, weights=share, histtype="step", linewidth=1.6, color=COLOURS[number], label=label)
    dress(left, "cosine between g_i and the sum of all", "cosine", "share of records")
    dress(middle, "distance of c_i from the best factors", "‖Δ‖/‖g‖", "mean |c_i − c_i*|·‖g_i‖/R", "x")
    dress(right, "progress along the true sum", "‖Δ‖/‖g‖", "share of the best", "x")
    return figure


def norms_by_rule() -> Any:
    """Figure 4: norms before and after each rule at R = 1."""
    figure, (left, right) = panels(2)
    norms = np.geomspace(0.01, 100, 800)
    shown = {**rules.named_rules(gamma=0.01, cutoff=2.0), "auto-s, γ = 0.1": rules.auto_s(0.1)}
    drawn = np.random.default_rng(0).lognormal(-1.0, 1.0, 20_000)
    for number, (name, rule) in enumerate(shown.items()):
        label = {"global": "global, Z = 2", "auto-s": "auto-s, γ = 0.01"}.get(name, name)
        curve(left, number, norms, directions.norms_after(norms, rule), label)
        if name != "auto-v":
            after, share = directions.norms_after(drawn, rule), np.full(len(drawn), 1 / len(drawn))
            style: dict[str, Any] = {"histtype": "step", "linewidth": 1.6, "color": COLOURS[number]}
            right.hist(after, np.linspace(0, 1.0001, 41), weights=share, label=label, **style)
    dress(left, "‖c·g‖ against ‖g‖, R = 1", "norm before", "norm after", "x", "center right")
    dress(
        right, "log-normal norms after clipping (auto-v: all at 1)", "norm after", "share of records", "y", "upper left"
    )
    right.set_ylim(bottom=1e-4)
    return figure


def lazy_logistic() -> Any:
    """Figure 3: the bias of a logistic regression on two classes N(±1, 1)."""
    problem = lazy_regions.logistic_problem()
    return _lazy(
        problem, lazy_regions.LOGISTIC_RULES, lazy_regions.LOGISTIC_TOLERANCE, 0.04, "bias of a logistic regression"
    )


def lazy_mean() -> Any:
    """Figure 11: the mean of ½N(4, 1) + ½N(−4, 1)."""
    problem = lazy_regions.mean_problem()
    return _lazy(problem, lazy_regions.MEAN_RULES, lazy_regions.MEAN_TOLERANCE, 0.006, "mean of two normals at ±4")


def _lazy(
    problem: lazy_regions.ScalarProblem, shown: Mapping[str, ArrayRule], tolerance: float, near: float, title: str
) -> Any:
    figure, (left, right) = panels(2)
    for axes, ends in ((left, 6.0), (right, 2.6)):
        grid = np.linspace(-ends, ends, 301)
        for number, (name, rule) in enumerate(shown.items()):
            curve(axes, number, grid, [lazy_regions.clipped_mean(problem, rule, float(t)) for t in grid], name)
    for number, (name, rule) in enumerate(shown.items()):
        region = lazy_regions.lazy_region(problem, rule, tolerance)
        low, high = max(region.low, -2.6), min(region.high, 2.6)
        place = -near * (0.75 + 0.09 * number)
        right.plot([low, high], [place, place], color=COLOURS[number], linewidth=4, solid_capstyle="butt")
        words = "everywhere" if np.isinf(region.width) else f"[{region.low:.2f}, {region.high:.2f}]"
        right.plot([], [], color=COLOURS[number], linewidth=4, label=f"{name} within ±{tolerance:g}: {words}")
    for level in (-tolerance, tolerance):
        right.axhline(level, color="0.5", linestyle=":", linewidth=1)
    right.set_ylim(-near, near)
    dress(left, f"mean clipped gradient / R, {title}", "θ", "Σ c_i g_i / (N·R)")
    dress(right, "near zero: bars show the lazy regions", "θ", "Σ c_i g_i / (N·R)", legend="upper left")
    return figure
