"""Figures for DC's E(C) and Theorem 3, and for GLOBAL's kernels, facts and flows."""

from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from clipless.app.charts.drawing import COLOURS
from clipless.app.reproduce.drawing import curve, dress, panels
from clipless.theory import dc, facts, flows, ntk, rules

RECORDS, DIMENSION, SIGMA = 256, 100_000, 1.0


def error_and_bound() -> Any:
    """E(C) as variance and bias with its minimiser, on norms N(100, 20²); the bounds of Theorem 3 over steps."""
    figure, (left, right) = panels(2)
    norms = np.random.default_rng(0).normal(100, 20, RECORDS).clip(min=0)
    grid = np.linspace(1, 200, 400)
    parts = (SIGMA, DIMENSION, RECORDS)
    curve(left, 0, grid, dc.variance(grid, *parts), "noise σ²C²d/B²")
    curve(left, 1, grid, dc.clipping_bias(grid, norms), "clipping, mean (‖g‖ − C)₊²")
    curve(left, 6, grid, dc.expected_error(grid, norms, *parts), "E(C)", linestyle="-")
    best = dc.best_threshold(norms, *parts)
    least = float(dc.expected_error(best, norms, *parts))
    left.plot([best], [least], marker="*", markersize=13, color="black", linestyle="none")
    left.annotate(f"best C = {best:.1f}", (best, least), (best - 20, 14_000), fontsize=8)
    steps = np.geomspace(10, 1e6, 60)
    shares = {"p = 0.5": 0.5, "p = 0.9": 0.1, "p = 1, nothing clipped": 0.0}
    for number, (name, share) in enumerate(shares.items()):
        bounds = [dc.worst_case_bound(1.0, t**-0.5, t, 1.0, 1.0, share, 1.0, 1000, 256, 256 / 60_000) for t in steps]
        curve(right, number, steps, bounds, name)
    dress(left, "E(C): 256 norms from N(100, 20²), σ = 1, d = 10⁵", "threshold C", "squared error")
    dress(right, "Theorem 3: bound on the mean of ‖∇L‖², η = 1/√T", "steps T", "bound", "xy")
    return figure


def matrix_facts() -> Any:
    """A.1: directions in which eᵀHCe is negative; A.4: the eigenvalues of Σ H_r C_r over H₁[1,1]."""
    figure, (left, right) = panels(2)
    h, c, _ = facts.fact_a1()
    angles = np.linspace(0, np.pi, 361)
    vectors = np.stack([np.cos(angles), np.sin(angles)])
    for number, (name, exact) in enumerate({"H": h, "HC": facts.multiply(h, c)}.items()):
        array = np.array([[float(x) for x in row] for row in exact])
        curve(left, number, np.degrees(angles), np.einsum("in,ij,jn->n", vectors, array, vectors), f"eᵀ{name}e")
    left.axhline(0, color="0.4", linewidth=1)
    corners = [f"{n}/900" for n in range(560, 901, 10)]
    shown = [float(Fraction(corner)) for corner in corners]
    found = [facts.fact_a4(corner).clipped_kernel() for corner in corners]
    least = [float(ntk.eigenvalues(np.array([[float(x) for x in row] for row in each]))[0]) for each in found]
    curve(right, 0, shown, least, "least eigenvalue of Σ H_r C_r", linestyle="-")
    right.axhline(0, color="0.4", linewidth=1)
    for corner, words in (("8/9", "8/9: .080"), ("7/9", "7/9: 0"), ("7/10", "0.7: negative")):
        x = float(Fraction(corner))
        y = float(np.interp(x, shown, least))
        right.plot([x], [y], "o", color=COLOURS[1], markersize=6)
        right.annotate(words, (x, y), (5, -14), textcoords="offset points", fontsize=8)
    dress(left, "A.1: eigenvalues of HC are positive, its form is not", "angle of e in degrees", "quadratic form")
    dress(right, "A.4: a sum of products with H₁[1,1] varied", "H₁[1,1]", "eigenvalue")
    return figure


def clipped_kernels() -> Any:
    """Theorems 1 and 2 on a small network: least eigenvalue and least quadratic form of K over thresholds."""
    figure, axes = panels(2)
    network = ntk.Network.random((4, 32, 32, 1), seed=3)
    draws = np.random.default_rng(4)
    inputs = draws.normal(size=(8, 4))
    layers = ntk.kernels(network.jacobians(inputs))
    residuals = network.outputs(inputs) - draws.normal(size=8) * 2
    longest = float(np.sqrt(np.diag(sum(layers, np.zeros((8, 8)))) * residuals**2).max())
    kinds = {
        "abadi, flat": (rules.abadi, False),
        "abadi, per layer": (rules.abadi, True),
        "auto-s, flat": (rules.auto_s(0.01), False),
        "global, nobody dropped": (rules.global_(2 * longest), False),
        "global, one dropped": (rules.global_(0.99 * longest), False),
    }
    thresholds = np.geomspace(0.01, 100, 60)
    for number, (name, (rule, layerwise)) in enumerate(kinds.items()):
        least, form = [], []
        for bound in thresholds:
            shares = (bound / len(layers) ** 0.5,) * len(layers) if layerwise else (bound,)
            kernel = ntk.clipped_kernel(layers, ntk.factors(layers, residuals, rule, shares, layerwise))
            size = np.abs(ntk.eigenvalues(kernel)).max()
            least.append(ntk.eigenvalues(kernel)[0] / size)
            form.append(ntk.least_quadratic_form(kernel) / size)
        curve(axes[0], number, thresholds, least, name)
        curve(axes[1], number, thresholds, form, name)
    for place, title in zip(axes, ("least eigenvalue of K / largest", "least eᵀKe / largest eigenvalue"), strict=True):
        place.axhline(0, color="0.4", linewidth=1)
        dress(place, title, "threshold R", "", "x", legend=None)
    axes[0].legend(fontsize=8, frameon=False, loc=(0.05, 0.12))
    return figure


def losses_over_time() -> Any:
    """Theorem 1: flat clipping at which the loss grows first, layerwise clipping that stands still; Theorem 2: global."""
    figure, (left, right) = panels(2)
    layers, thresholds, start = ntk.growing_loss().arrays()
    times = np.linspace(0, 40, 401)
    _losses(left, 0, times, ntk.residual_flow(layers, start, rules.abadi, thresholds, False, times), "abadi, flat")
    kept = ntk.residual_flow(layers, start, rules.global_(20.0), (1.0,), False, times)
    _losses(left, 2, times, kept, "global, Z = 20: nobody dropped")
    dropped = ntk.residual_flow(layers, start, rules.global_(8.0), (1.0,), False, times)
    _losses(left, 1, times, dropped, "global, Z = 8: one record dropped")
    layers, thresholds, there = ntk.stationary_point().arrays()
    times, start = np.linspace(0, 300, 301), there + np.array([1.0, 0.5, 0.2])
    _losses(right, 1, times, ntk.residual_flow(layers, start, rules.abadi, thresholds, True, times), "abadi, per layer")
    _losses(right, 0, times, ntk.residual_flow(layers, start, rules.abadi, (2.0,), False, times), "abadi, flat")
    whole = ntk.residual_flow(layers, start, rules.global_(20.0), (2.0,), False, times)
    _losses(right, 2, times, whole, "global, nobody dropped")
    right.axhline(9, color="0.4", linewidth=1, linestyle=":", label="stationary point, loss 9")
    dress(left, "flat clipping: the loss can grow", "time", "loss ½‖e‖²")
    dress(right, "layer by layer: it can stand still", "time", "loss ½‖e‖²")
    return figure


def _losses(axes: Any, number: int, times: Any, residuals: Any, label: str) -> None:
    curve(axes, number, times, 0.5 * (residuals**2).sum(1), label)


def losses_by_optimizer() -> Any:
    """Theorem 4: each optimizer on the network that stands still, under local layerwise, local flat and global clipping."""
    figure, axes = panels(3)
    network = ntk.standing_network()
    kinds = {
        "local, layer by layer: the loss stays": (rules.abadi, network.thresholds, True),
        "local, flat": (rules.abadi, (2.0,), False),
        "global, layer by layer, none dropped": (rules.global_(20.0), (20.0, 20.0), True),
    }
    times, soft = np.linspace(0.01, 30, 300), flows.Constants(epsilon=0.2)
    names = [name for name in flows.OPTIMIZERS if name != "gradient"]
    for place, (title, (rule, thresholds, layerwise)) in zip(axes, kinds.items(), strict=True):
        field = partial(network.clipped_gradient, rule=rule, thresholds=thresholds, layerwise=layerwise)
        for number, name in enumerate(names):
            path = flows.flow(name, field, network.start, times, soft)
            curve(place, number, times, 0.5 * (network.residuals(path) ** 2).sum(1), name)
        place.set_ylim(-0.4, 11)
        dress(place, title, "time", "loss ½‖e‖²", legend="lower right" if layerwise and rule is rules.abadi else "best")
    return figure


def optimizer_flows() -> Any:
    """F.1-F.8: flows of the optimizers on a quadratic, loss over time and paths, with the optimizers' own steps as dots."""
    figure, (left, right) = panels(2)
    curves, start = np.array([1.0, 6.0]), np.array([1.0, 0.8])
    times, h = np.linspace(0.001, 10, 600), 0.05

    def field(w: Any) -> Any:
        return curves * w

    for number, name in enumerate(flows.OPTIMIZERS):
        path = flows.flow(name, field, start, times)
        curve(left, number, times, 0.5 * (path**2 @ curves), name)
        curve(right, number, path[:, 0], path[:, 1], name)
        steps = flows.descend(name, field, start, 60, h)[::3]
        right.plot(steps[:, 0], steps[:, 1], "o", color=COLOURS[number], markersize=2.5)
    left.set_ylim(1e-7, 10)
    dress(left, "loss ½(w₁² + 6w₂²) along each flow", "time", "loss", "y", "lower left")
    dress(right, "paths; dots: the optimizer with h = 0.05", "w₁", "w₂")
    return figure
