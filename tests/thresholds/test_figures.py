"""The sanity figures of DC-SGD: 256 norms from N(100, 20²), a range of 200, what a noised histogram still tells.

A single noised histogram of 50 bins and multiplier 10 does not tell a percentile to within a bin; the median of many
does. So percentiles are judged by the median of 101 draws, and by single draws where the noise is moderate.
"""

import numpy as np
import pytest
import torch

from clipless.thresholds import DCE, DCP, Setting
from clipless.thresholds.dc_e import CANDIDATES, expected_error

RANGE, RECORDS, DIMENSION = 200.0, 256, 100_000


def norms() -> torch.Tensor:
    return (torch.randn(1, RECORDS, generator=torch.Generator().manual_seed(0)) * 20 + 100).clamp(min=0)


def state() -> dict[str, torch.Tensor]:
    return {"thresholds": torch.ones(1, 1), "range": torch.full((1, 1), RANGE, dtype=torch.float64)}


def released_percentiles(bins: int, multiplier: float, percentile: float, draws: int) -> torch.Tensor:
    policy, generator = DCP(bins=bins, percentile=percentile), torch.Generator().manual_seed(1)
    counts = policy.observe(state(), norms())
    noise = torch.randn(draws, *counts.shape, generator=generator, dtype=torch.float64) * multiplier
    found = [policy.update(state(), counts + n, Setting(1))["thresholds"] for n in noise]
    return torch.cat(found).flatten()


@pytest.mark.parametrize("bins", [10, 20, 30, 50])
@pytest.mark.parametrize("multiplier", [1.0, 3.0, 5.0, 8.0, 10.0])
def test_released_percentile_is_within_one_bin_of_the_true_one(bins: int, multiplier: float) -> None:
    """Figure 2."""
    for percentile in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        if bins * multiplier > 250 and not 0.2 <= percentile <= 0.8:
            continue
        true = float(norms().quantile(percentile))
        found = released_percentiles(bins, multiplier, percentile, draws=101)
        assert abs(float(found.median()) - true) <= RANGE / bins


@pytest.mark.parametrize("bins", [10, 20])
def test_every_single_release_is_within_one_bin_at_little_noise(bins: int) -> None:
    for percentile in (0.1, 0.5, 0.9):
        found = released_percentiles(bins, 1.0, percentile, draws=101)
        assert float((found - norms().quantile(percentile)).abs().max()) <= RANGE / bins


@pytest.mark.parametrize("bins", [10, 20, 30, 50])
@pytest.mark.parametrize("multiplier", [1.0, 3.0, 5.0, 8.0, 10.0])
@pytest.mark.parametrize("threshold", [40.0, 80.0, 130.0])
def test_released_error_curve_has_its_minimum_within_one_candidate(
    bins: int, multiplier: float, threshold: float
) -> None:
    """Figure 3, σ_T = 1, B = 256, d = 1e5; every one of 101 draws, at the most noise in the most bins 9 of 10."""
    candidates, cost = threshold * CANDIDATES, DIMENSION / RECORDS**2
    cut = np.maximum(norms().double().numpy() - candidates[:, None], 0.0)
    truth = cost * candidates**2 + (cut**2).mean(1)
    policy, generator = DCE(bins=bins), torch.Generator().manual_seed(2)
    counts, middles = policy.observe(state(), norms())[0], policy.middles(state())[0]
    near = 0
    for _ in range(101):
        noised = counts + multiplier * torch.randn(bins, generator=generator, dtype=torch.float64)
        found = expected_error(candidates, noised.clamp(min=0).numpy(), middles.numpy(), cost).argmin()
        near += abs(int(found) - int(truth.argmin())) <= 1
    assert near == 101 if bins * multiplier <= 250 else near >= 91
