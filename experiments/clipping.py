"""Writes the figures and the tables of docs/clipping.md from real runs on the digits data: `make figures`."""

import argparse
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track

mpl.use("svg")
import matplotlib.pyplot as plt

import clipless
from clipless.app import data as data_sets
from clipless.app import models, training
from clipless.clipping import Clipping
from clipless.thresholds import DCE, DCP, Setting
from clipless.thresholds.dc_e import CANDIDATES, expected_error

DOCS = Path(__file__).parents[1] / "docs"
SEEDS = range(3)
EPSILON, EPOCHS, BATCH, LEARNING_RATE = 3.0, 40, 256, 0.15
DELTA = 3.3635474216673706e-4  # of the stored figures; larger than the default

CLIPPINGS: dict[str, Clipping] = {
    "auto-s": clipless.auto_s(),
    "auto-v": clipless.auto_v(),
    "abadi, R=1": clipless.abadi(),
    "abadi, R=0.01": clipless.abadi(threshold=0.01),
    "abadi, R=100": clipless.abadi(threshold=100.0),
    "global, Z=1": clipless.global_(),
    "global, Z=10": clipless.global_(cutoff=10.0),
    "dc-p": clipless.dc_p(),
    "dc-e": clipless.dc_e(),
    "dc-e, start 0.01": clipless.dc_e(start=0.01),
    "dc-e, start 100": clipless.dc_e(start=100.0),
    "quantile": clipless.quantile(),
    "quantile, start 0.01": clipless.quantile(start=0.01),
    "quantile, start 100": clipless.quantile(start=100.0),
    "decay": clipless.decay(),
}


def run(clipping: Clipping, seed: int, epochs: int) -> dict[str, Any]:
    """One private run of the small MLP: accuracy, noise multipliers, and the thresholds of every step."""
    digits = data_sets.load("digits")
    torch.manual_seed(seed)
    model = models.build("mlp", digits.shape, digits.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    warnings.filterwarnings("ignore", message="delta=.* is above 1/")  # DELTA is
    private = clipless.make_private(
        model,
        optimizer,
        digits.train,
        epsilon=EPSILON,
        delta=DELTA,
        batch_size=BATCH,
        epochs=epochs,
        clipping=clipping,
        seed=seed,
        loss_reduction="mean",
    )
    thresholds = []
    for _ in range(private.epochs):
        for x, y in private.loader:
            thresholds.append(float(private.thresholds.norm()))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    spent, plan = private.spent(), private.plan
    private.detach()
    return {
        "accuracy": training.accuracy(model, digits.test),
        "epsilon": spent.epsilon,
        "noise_multiplier": plan.noise_multiplier,
        "gradient_multiplier": plan.gradient_multiplier,
        "thresholds": thresholds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and draw what docs/clipping.md shows.")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder with clipping.md, and figures in it")
    parser.add_argument("--quick", action="store_true", help="one epoch, two seeds: to try the script, not to quote")
    arguments = parser.parse_args()
    docs, epochs, seeds = arguments.docs, 1 if arguments.quick else EPOCHS, SEEDS[: 2 if arguments.quick else None]
    torch.set_num_threads(1)
    results = {
        name: [run(clipping, seed, epochs) for seed in seeds]
        for name, clipping in track(CLIPPINGS.items(), description="training")
    }
    figures = docs / "figures"
    figures.mkdir(exist_ok=True)
    write_json(results, epochs, figures)
    draw_thresholds(results, figures)
    draw_percentiles(figures)
    draw_error_curves(figures)
    write_table(results, docs / "clipping.md")


def write_json(results: dict[str, list[dict[str, Any]]], epochs: int, figures: Path) -> None:
    seeds = len(next(iter(results.values())))
    setting = {"epsilon": EPSILON, "epochs": epochs, "batch": BATCH, "lr": LEARNING_RATE, "seeds": seeds}
    rounded = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.5g}"))
    text = json.dumps({"setting": setting, "runs": rounded})
    (figures / "clipping.json").write_text(text + "\n")


def write_table(results: dict[str, list[dict[str, Any]]], page: Path) -> None:
    """Put the table between its markers in docs/clipping.md."""
    rows = ["| clipping | test accuracy | noise on the gradient | threshold at the end |", "| --- | --- | --- | --- |"]
    for name, runs in results.items():
        accuracy = [100 * each["accuracy"] for each in runs]
        spread = f"{statistics.mean(accuracy):.1f} ± {statistics.stdev(accuracy):.1f} %"
        noise = statistics.mean(each["gradient_multiplier"] for each in runs)
        last = statistics.mean(each["thresholds"][-1] for each in runs)
        rows.append(f"| {name} | {spread} | {noise:.3g} | {last:.3g} |")
    before, _, rest = page.read_text().partition("<!-- table -->")
    after = rest.partition("<!-- end of table -->")[2]
    page.write_text(before + "<!-- table -->\n" + "\n".join(rows) + "\n<!-- end of table -->" + after)


def draw_thresholds(results: dict[str, list[dict[str, Any]]], figures: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    for name in ("dc-e", "dc-e, start 0.01", "dc-e, start 100", "dc-p", "quantile, start 0.01", "quantile, start 100"):
        axes.plot(results[name][0]["thresholds"], label=name, linewidth=1)
    axes.set(yscale="log", xlabel="step", ylabel="threshold", title="Thresholds that set themselves, digits, ε = 3")
    axes.legend(fontsize=8)
    save(figure, figures / "thresholds.svg")


def norms() -> torch.Tensor:
    return (torch.randn(1, 256, generator=torch.Generator().manual_seed(0)) * 20 + 100).clamp(min=0)


def histogram_state() -> dict[str, torch.Tensor]:
    return {"thresholds": torch.ones(1, 1), "range": torch.full((1, 1), 200.0, dtype=torch.float64)}


def draw_percentiles(figures: Path) -> None:
    """Released against true percentiles of 256 norms from N(100, 20²)."""
    figure, axes = plt.subplots(figsize=(7, 4))
    shares = [p / 10 for p in range(1, 10)]
    axes.plot(shares, [float(norms().quantile(p)) for p in shares], "k-", label="true")
    for multiplier in (1, 5, 10):
        generator = torch.Generator().manual_seed(multiplier)
        found = []
        for percentile in shares:
            policy = DCP(percentile=percentile)
            counts = policy.observe(histogram_state(), norms())
            noise = multiplier * torch.randn(counts.shape, generator=generator, dtype=torch.float64)
            found.append(float(policy.update(histogram_state(), counts + noise, Setting(1))["thresholds"]))
        axes.plot(shares, found, "o--", markersize=4, linewidth=1, label=f"released, σ_H = {multiplier}")
    axes.set(xlabel="percentile", ylabel="norm", title="dc-p: percentiles from one noised histogram of 20 bins")
    axes.legend(fontsize=8)
    save(figure, figures / "dc-p.svg")


def draw_error_curves(figures: Path) -> None:
    """Released against true E(C), σ_T = 1, B = 256, d = 1e5."""
    figure, axes = plt.subplots(figsize=(7, 4))
    candidates, cost = 40 * CANDIDATES, 1e5 / 256**2
    cut = np.maximum(norms().double().numpy() - candidates[:, None], 0.0)
    truth = cost * candidates**2 + (cut**2).mean(1)
    axes.plot(candidates, truth, "k-", label="true")
    policy = DCE()
    counts = policy.observe(histogram_state(), norms())[0].numpy()
    middles = policy.middles(histogram_state())[0].numpy()
    for multiplier in (1, 5, 10):
        noise = torch.randn(20, generator=torch.Generator().manual_seed(multiplier), dtype=torch.float64).numpy()
        curve = expected_error(candidates, np.maximum(counts + multiplier * noise, 0.0), middles, cost)
        axes.plot(candidates, curve, "o--", markersize=4, linewidth=1, label=f"released, σ_H = {multiplier}")
    axes.set(xlabel="threshold C", ylabel="E(C)", title="dc-e: expected error from one noised histogram of 20 bins")
    axes.legend(fontsize=8)
    save(figure, figures / "dc-e.svg")


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    mpl.rcParams["svg.hashsalt"] = "clipless"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
