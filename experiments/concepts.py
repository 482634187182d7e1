"""Draws the pictures of docs/epsilon.md and docs/clipping_explained.md: `make figures`. Nothing is trained; all curves are
computed by the functions that the library uses."""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clipless
from clipless.app.charts.drawing import COLOURS, Chart, Line, figure, lines, save
from clipless.app.report_page.promise import right_guesses
from clipless.clipping import Clipping

DOCS = Path(__file__).parents[1] / "docs"
DELTA = 1e-5
RULES: dict[str, Clipping] = {
    "abadi, R = 1": clipless.abadi(),
    "auto-s, R = 1": clipless.auto_s(),
    "global, Z = 3, R = 1": clipless.global_(cutoff=3.0, threshold=1.0),
}
# Gradients of eight records in two dimensions, one of them an outlier.
GRADIENTS = torch.tensor(
    [[0.5, 0.9], [1.3, 0.4], [0.2, 0.35], [0.9, 1.2], [-0.3, 0.7], [0.7, -0.25], [1.1, 0.9], [-2.6, 1.9]]
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the pages about concepts.")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the documentation")
    figures = parser.parse_args().docs / "figures"
    draw_two_worlds(figures / "two-worlds.svg")
    draw_guesses(figures / "guesses.svg")
    draw_alarms(figures / "alarms.svg")
    draw_arrows(figures / "clipped-arrows.svg")
    draw_lengths(figures / "clipped-lengths.svg")
    draw_thresholds(figures / "clipping.json", figures / "threshold-matters.svg")


def draw_two_worlds(path: Path) -> None:
    """What can be released with and without one record, with little noise and with much."""
    made, both = figure(2)
    x = np.linspace(-4, 6, 400)
    for axes, noise in zip(both, (0.3, 1.5), strict=True):
        density = [np.exp(-(((x - middle) / noise) ** 2) / 2) / noise / np.sqrt(2 * np.pi) for middle in (0.0, 1.0)]
        spent = clipless.epsilon(noise_multiplier=noise, sample_rate=1.0, steps=1, delta=DELTA)
        chart = Chart(
            title=f"noise {noise} times the largest contribution: ε = {spent:.2g}, one step",
            x_label="released number",
            y_label="probability density",
            lines=(),
        )
        lines(axes, chart)
        for curve, label, colour in zip(density, ("without the record", "with the record"), COLOURS, strict=False):
            axes.plot(x, curve, color=colour, label=label, linestyle="-" if colour == COLOURS[0] else "--")
            axes.fill_between(x, curve, color=colour, alpha=0.12)
        axes.set_ylim(0)
        axes.legend(fontsize=8, frameon=False)
    save(made, path)


def draw_guesses(path: Path) -> None:
    """How often anybody can be right about whether a record was used."""
    made, (axes,) = figure()
    epsilons = [round(0.1 * tenth, 1) for tenth in range(101)]
    chart = Chart(
        title=f"Was this record used? A fair coin decided. δ = {DELTA:g}",
        x_label="ε",
        y_label="right guesses, at most",
        lines=(),
        level=(0.5, "by guessing blindly"),
    )
    lines(axes, chart)
    axes.plot(epsilons, [right_guesses(epsilon, DELTA) for epsilon in epsilons], color=COLOURS[0])
    for epsilon in (0.5, 1.0, 3.0, 8.0):
        most = right_guesses(epsilon, DELTA)
        axes.plot([epsilon], [most], "o", color=COLOURS[1], markersize=5)
        told = f"ε = {epsilon:g}: {100 * most:.4g} %"
        axes.annotate(told, (epsilon, most), (8, -12), textcoords="offset points", fontsize=8)
    axes.set_ylim(0.45, 1.03)
    save(made, path)


def draw_alarms(path: Path) -> None:
    """True against false positive rate of the best test that (ε, δ) allows."""
    false_alarms = np.linspace(0, 1, 401)
    made, (axes,) = figure()
    curves = [Line("no information", (0.0, 1.0), (0.0, 1.0), approximate=True)]
    lines(
        axes,
        Chart("What the best attack can reach, at most", "false positive rate", "true positive rate", tuple(curves)),
    )
    for epsilon, colour in zip((8.0, 3.0, 1.0, 0.5), COLOURS[1:], strict=False):
        grown = np.exp(epsilon) * false_alarms + DELTA
        missed = np.exp(-epsilon) * (1 - DELTA - false_alarms)
        axes.plot(false_alarms, np.clip(np.minimum(grown, 1 - missed), 0, 1), color=colour, label=f"ε = {epsilon:g}")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    save(made, path)


def draw_arrows(path: Path) -> None:
    """Eight gradients as they are, and after each rule."""
    made, panels = figure(1 + len(RULES))
    made.set_size_inches(3.4 * len(panels), 3.1)
    norms = GRADIENTS.norm(dim=1)[None]
    shown = {"gradients of eight records": GRADIENTS}
    for name, clipping in RULES.items():
        shown[name] = clipping.rule(norms, torch.ones(1, 1)).T * GRADIENTS
    for axes, (name, vectors) in zip(panels, shown.items(), strict=True):
        _arrows(axes, name, vectors.numpy(), circle=name in RULES)
    save(made, path)


def _arrows(axes: Any, title: str, vectors: np.ndarray, circle: bool) -> None:
    for vector, outlier in zip(vectors, [False] * (len(vectors) - 1) + [True], strict=True):
        colour = COLOURS[1] if outlier else COLOURS[0]
        if np.linalg.norm(vector) > 1e-9:
            axes.annotate("", tuple(vector), (0, 0), arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.6})
    if circle:
        turn = np.linspace(0, 2 * np.pi, 100)
        axes.plot(np.cos(turn), np.sin(turn), color="0.5", linewidth=1, linestyle=":")
    axes.set_xlim(-2.9, 1.9)
    axes.set_ylim(-1.3, 2.3)
    axes.set_aspect("equal")
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=7)
    axes.grid(True, color="0.9", linewidth=0.6)


def draw_lengths(path: Path) -> None:
    """The length of what enters the sum, against the length of the gradient."""
    norms = torch.logspace(-3, 2, 241)[None]
    made, (axes,) = figure()
    rules = RULES | {"auto-v, R = 1": clipless.auto_v()}
    lines(
        axes,
        Chart("What a record adds to the sum", "norm of its gradient", "norm after clipping", (), log_x=True),
    )
    for (name, clipping), colour, dashes in zip(rules.items(), COLOURS, ("-", "-", "-", "--"), strict=False):
        after = (clipping.rule(norms, torch.ones(1, 1)) * norms)[0]
        axes.plot(norms[0].numpy(), after.numpy(), color=colour, label=name, linestyle=dashes, linewidth=1.6)
    axes.set_xticks([0.001, 0.01, 0.1, 1, 10, 100])
    axes.set_ylim(-0.03, 1.15)
    axes.legend(fontsize=8, frameon=False)
    save(made, path)


def draw_thresholds(stored: Path, path: Path) -> None:
    """Test accuracy by threshold, from the stored runs of experiments/clipping.py."""
    results = json.loads(stored.read_text(encoding="utf-8"))["runs"]
    names = ["abadi, R=0.01", "abadi, R=1", "abadi, R=100", "auto-s"]
    means = [statistics.mean(100 * run["accuracy"] for run in results[name]) for name in names]
    made, (axes,) = figure()
    lines(axes, Chart("One budget, one learning rate: digits, ε = 3", "", "test accuracy, %", ()))
    drawn = axes.bar(range(len(names)), means, 0.6, color=[COLOURS[0]] * 3 + [COLOURS[2]])
    axes.bar_label(drawn, fmt="%.0f", fontsize=8, padding=2)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 110)
    save(made, path)


if __name__ == "__main__":
    main()
