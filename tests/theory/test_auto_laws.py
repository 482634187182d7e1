"""AUTO Theorem 5 against the accountant's own formula, searches and the exact term."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from clipless.accounting import epsilon
from clipless.accounting.gaussian import gaussian_epsilon
from clipless.theory.auto_laws import (
    ProblemConstants,
    best_learning_rate,
    cost_of_rate,
    gdp_noise_multiplier,
    leading_term,
    private_bound,
    private_term,
)

CONSTANTS = ProblemConstants()
BATCHES = (64.0, 512.0, 4096.0)


@pytest.mark.parametrize("batch", [64, 512, 4096])
@pytest.mark.parametrize("steps", [100, 10_000])
def test_noise_multiplier_costs_its_budget(batch: int, steps: int) -> None:
    sigma = gdp_noise_multiplier(1.5, batch, 50_000, steps)
    spent = epsilon(noise_multiplier=sigma, sample_rate=batch / 50_000, steps=steps, delta=1e-5, accountant="gdp")
    assert spent == pytest.approx(gaussian_epsilon(1.5, 1e-5), rel=1e-9)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("steps", [10.0, 1e3, 1e6])
def test_term_is_the_leading_one_and_a_remainder_of_known_size(batch: float, steps: float) -> None:
    scale = 16 * CONSTANTS.loss_gap * CONSTANTS.smoothness
    remainder = (private_term(CONSTANTS, steps, batch) ** 2 - leading_term(CONSTANTS, steps) ** 2) / scale
    assert 0 <= remainder <= CONSTANTS.dimension / (2 * batch**2 * steps) * (1 + 1e-6)


def test_more_steps_and_larger_batches_help() -> None:
    for batch in BATCHES:
        bounds = [private_bound(CONSTANTS, steps, batch) for steps in (1e2, 1e3, 1e4, 1e5)]
        noises = [gdp_noise_multiplier(CONSTANTS.mu, batch, CONSTANTS.records, steps) for steps in (1e2, 1e3, 1e4, 1e5)]
        assert all(b < a for a, b in itertools.pairwise(bounds))
        assert all(b > a for a, b in itertools.pairwise(noises)), "although each step has more noise"
    for steps in (1e2, 1e4):
        bounds = [private_bound(CONSTANTS, steps, batch) for batch in BATCHES]
        assert all(b < a for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("name", ["loss_gap", "smoothness", "xi"])
def test_a_better_start_helps(name: str) -> None:
    better = dataclasses.replace(CONSTANTS, **{name: getattr(CONSTANTS, name) / 4})
    assert private_bound(better, 1e4, 512) < private_bound(CONSTANTS, 1e4, 512)


@pytest.mark.parametrize("steps", [100.0, 1e4, 1e6])
@pytest.mark.parametrize("dimension", [1e3, 1e6])
def test_best_learning_rate_is_the_minimiser(steps: float, dimension: float) -> None:
    constants = dataclasses.replace(CONSTANTS, dimension=dimension)
    found = minimize_scalar(
        lambda log: cost_of_rate(constants, steps, math.exp(log)), bracket=(-1, 1), options={"xtol": 1e-10}
    )
    assert best_learning_rate(constants, steps) == pytest.approx(math.exp(found.x), rel=1e-5)
    assert cost_of_rate(constants, steps, best_learning_rate(constants, steps)) * 2 / math.sqrt(steps) == pytest.approx(
        leading_term(constants, steps)
    )


def test_best_learning_rate_by_the_exact_noise_hardly_depends_on_the_batch() -> None:
    """Minimised with the σ of each batch: within what the O(1/(B²T)) leaves, and as the law says."""
    steps = 1e4
    found = []
    for batch in BATCHES:
        sigma = gdp_noise_multiplier(CONSTANTS.mu, batch, CONSTANTS.records, steps)
        noise = sigma**2 * CONSTANTS.dimension / batch**2
        rates = np.geomspace(1e-3, 10, 40_001)
        found.append(rates[(CONSTANTS.loss_gap / rates + rates * CONSTANTS.smoothness * (1 + noise)).argmin()])
    assert found[2] == pytest.approx(best_learning_rate(CONSTANTS, steps), rel=0.01)
    assert found[1] == pytest.approx(best_learning_rate(CONSTANTS, steps), rel=0.2)
    law = [best_learning_rate(dataclasses.replace(CONSTANTS, mu=mu), steps) for mu in (0.1, 1.0, 10.0)]
    assert law[0] < law[1] < law[2]
