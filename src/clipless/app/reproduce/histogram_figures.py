"""DC's figures 2 and 3: what a private histogram of gradient norms says about percentiles and about E(C)."""

from typing import Any

import numpy as np
import torch

from clipless.app.reproduce.drawing import curve, dress, panels
from clipless.theory import dc
from clipless.thresholds import dc_e
from clipless.thresholds.dc_p import DCP
from clipless.thresholds.policy import Setting

RECORDS, CENTRE, SPREAD = 256, 100.0, 20.0
BINS, NOISES = (10, 20, 50), (0.0, 5.0, 10.0)
WIDE, NARROW = 150.0, 120.0
SIGMA, DIMENSION = 1.0, 100_000


def thresholds_over_percentiles() -> Any:
    """Figure 2: the threshold that DC-P takes for each percentile, by bins and noise, beside the true percentile."""
    figure, axes = panels(3)
    shares = np.linspace(0.02, 0.98, 97)
    for seed, (place, bins) in enumerate(zip(axes, BINS, strict=True)):
        norms = _norms(seed)
        curve(place, 6, shares, np.quantile(norms, shares), "true percentile", linestyle="-", linewidth=2.5)
        for number, noise in enumerate(NOISES):
            released = _released(norms, bins, WIDE, noise, seed)
            found = [_threshold(released, float(share), WIDE) for share in shares]
            curve(place, number, shares, found, f"σ_H = {noise:g}")
        dress(place, f"{bins} bins on [0, 150]", "percentile p", "threshold C")
    return figure


def errors_over_thresholds() -> Any:
    """Figure 3: E(C) estimated from histograms of range 120, beside the true one; stars mark the minima."""
    figure, axes = panels(3)
    candidates = np.linspace(1, 150, 300)
    cost = SIGMA**2 * DIMENSION / RECORDS**2
    for seed, (place, bins) in enumerate(zip(axes, BINS, strict=True)):
        norms = _norms(seed)
        true = dc.expected_error(candidates, norms, SIGMA, DIMENSION, RECORDS)
        curve(place, 6, candidates, true, "true E(C)", linestyle="-", linewidth=2.5)
        for number, noise in enumerate(NOISES):
            counts = _released(norms, bins, NARROW, noise, seed)[0].numpy().clip(min=0)
            middles = (np.arange(bins) + 0.5) * NARROW / bins
            error = dc_e.expected_error(candidates, counts, middles, cost)
            curve(place, number, candidates, error, f"σ_H = {noise:g}")
            best = int(error.argmin())
            place.plot(candidates[best], error[best], marker="*", color="black", markersize=8, linestyle="none")
        place.plot(candidates[true.argmin()], true.min(), marker="*", color="black", markersize=12, linestyle="none")
        dress(place, f"{bins} bins on [0, 120]", "threshold C", "expected squared error")
    return figure


def _norms(seed: int) -> Any:
    return np.random.default_rng(seed).normal(CENTRE, SPREAD, RECORDS).clip(min=0)


def _released(norms: Any, bins: int, span: float, noise: float, seed: int) -> Any:
    """The counts [1, bins] as DC-P and DC-E see them, with normal noise."""
    state = {"range": torch.tensor([[span]], dtype=torch.float64)}
    counts = DCP(bins=bins).observe(state, torch.tensor(norms)[None])
    assert counts is not None
    return counts + noise * torch.tensor(np.random.default_rng(100 + seed).normal(size=(1, bins)))


def _threshold(released: Any, percentile: float, span: float) -> float:
    policy = DCP(bins=released.shape[1], percentile=percentile)
    state = {"thresholds": torch.tensor([[1.0]]), "range": torch.tensor([[span]], dtype=torch.float64)}
    return float(policy.update(state, released, Setting(groups=1))["thresholds"])
