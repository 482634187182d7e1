"""Lazy regions against scans and closed forms, the best factors against a linear program, the rules against training's."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.stats import norm

from clipless import clipping
from clipless.errors import InvalidArgument
from clipless.theory import directions, lazy_regions, rules
from clipless.theory.lazy_regions import (
    LOGISTIC_RULES,
    LOGISTIC_TOLERANCE,
    MEAN_RULES,
    MEAN_TOLERANCE,
    clipped_mean,
    lazy_region,
    logistic_problem,
    mean_problem,
)

LOGISTIC, MEAN = logistic_problem(), mean_problem()
CASES = [(LOGISTIC, rule, LOGISTIC_TOLERANCE) for rule in LOGISTIC_RULES.values()] + [
    (MEAN, rule, MEAN_TOLERANCE) for rule in MEAN_RULES.values()
]


@pytest.mark.parametrize("name", ["abadi", "auto-v", "auto-s", "global"])
def test_rules_are_those_of_training(name: str) -> None:
    norms = np.array([0.0, 1e-6, 0.3, 1.0, 2.5, 40.0])
    trained = {
        "abadi": clipping.abadi(0.5),
        "auto-v": clipping.auto_v(0.5),
        "auto-s": clipping.auto_s(0.02, 0.5),
        "global": clipping.global_(cutoff=2.0, threshold=0.5),
    }[name]
    expected = trained.rule(torch.tensor(norms)[None], torch.tensor([[0.5]], dtype=torch.float64))[0].numpy()
    found = rules.named_rules(gamma=0.02, cutoff=2.0)[name](norms, 0.5)
    np.testing.assert_allclose((found * norms), (expected * norms), rtol=2.0**-21)  # in training 2^-22 less


@pytest.mark.parametrize(("problem", "loss"), [(LOGISTIC, "logistic"), (MEAN, "mean")], ids=["logistic", "mean"])
def test_gradients_are_derivatives_of_the_loss(problem: lazy_regions.ScalarProblem, loss: str) -> None:
    def value(theta: float) -> float:
        if isinstance(problem, lazy_regions.Mean):
            return float((0.5 * (theta - problem.x) ** 2).mean())
        return float(np.logaddexp(0, -problem.y * (theta + problem.x)).mean())

    for theta in (-3.0, 0.2, 2.0):
        assert float(problem.gradients(theta).mean()) == pytest.approx(
            (value(theta + 1e-5) - value(theta - 1e-5)) / 2e-5, rel=1e-4
        )


@pytest.mark.parametrize(("problem", "rule", "tolerance"), CASES)
def test_region_is_what_a_scan_finds(
    problem: lazy_regions.ScalarProblem, rule: rules.ArrayRule, tolerance: float
) -> None:
    grid = np.linspace(-4, 4, 401)
    values = np.array([clipped_mean(problem, rule, float(theta)) for theta in grid])
    assert (np.diff(values) >= -1e-12).all(), "one root at either end"
    inside = grid[np.abs(values) <= tolerance * (1 + 1e-9)]
    region = lazy_region(problem, rule, tolerance)
    if math.isinf(region.width):
        assert len(inside) == len(grid)
    else:
        assert (region.low, region.high) == pytest.approx((inside[0], inside[-1]), abs=0.021)


def test_regions_are_those_that_the_paper_names_and_auto_s_has_none() -> None:
    abadi = lazy_region(LOGISTIC, LOGISTIC_RULES["abadi"], LOGISTIC_TOLERANCE)
    assert (abadi.low, abadi.high) == pytest.approx((-2, 2), abs=0.15)
    assert math.isinf(lazy_region(LOGISTIC, LOGISTIC_RULES["auto-v"], 0.0001).width), "zero at every θ"
    assert lazy_region(LOGISTIC, LOGISTIC_RULES["auto-s"], LOGISTIC_TOLERANCE).width < abadi.width / 5
    for name in ("abadi", "auto-v"):
        region = lazy_region(MEAN, MEAN_RULES[name], MEAN_TOLERANCE)
        assert (region.low, region.high) == pytest.approx((-1, 1), abs=0.15)
        assert lazy_region(MEAN, MEAN_RULES["auto-s"], MEAN_TOLERANCE).width < region.width / 5


def test_a_region_needs_a_tolerance() -> None:
    with pytest.raises(InvalidArgument, match="tolerance"):
        lazy_region(MEAN, rules.abadi, 0.0)


def test_auto_v_counts_records_on_either_side() -> None:
    """On ½N(4,1) + ½N(−4,1) its mean is Φ(θ−4) + Φ(θ+4) − 1; 400,000 records, five standard errors."""
    problem = mean_problem(400_000)
    for theta in (-5.0, -1.0, 0.5, 3.0):
        expected = norm.cdf(theta - 4) + norm.cdf(theta + 4) - 1
        assert clipped_mean(problem, rules.auto_v, theta) == pytest.approx(expected, abs=5 / math.sqrt(400_000))


def test_best_factors_solve_the_linear_program() -> None:
    for seed in range(10):
        gradients = np.random.default_rng(seed).normal(size=(12, 5)) + 0.3
        norms = np.linalg.norm(gradients, axis=1)
        along = gradients @ gradients.sum(0)
        solved = linprog(-along, bounds=[(0, 2.0 / length) for length in norms])
        found = directions.best_factors(gradients, 2.0)
        assert found @ along == pytest.approx(-solved.fun)
        assert directions.progress(gradients, found, 2.0) == pytest.approx(1.0)
        for name, rule in rules.named_rules(cutoff=3.0).items():
            assert directions.progress(gradients, rule(norms, 2.0), 2.0) <= 1 + 1e-12, name


def test_without_noise_auto_v_is_the_best_and_abadi_is_not() -> None:
    gradients = directions.sample_gradients(400, 100, noise=0.3)
    assert (directions.dot_products(gradients) > 0).all()
    assert directions.distance_from_best(gradients, rules.auto_v) == 0
    assert directions.progress(gradients, rules.auto_v(np.linalg.norm(gradients, axis=1), 1.0)) == 1
    assert directions.distance_from_best(gradients, rules.auto_s(0.01)) < 0.02
    assert directions.distance_from_best(gradients, rules.abadi, threshold=10.0) > 0.5
    gaps = [
        directions.distance_from_best(directions.sample_gradients(400, 100, noise), rules.auto_v)
        for noise in (1, 8, 64)
    ]
    assert all(later > earlier for earlier, later in itertools.pairwise(gaps))
    samples = directions.sample_gradients(4000, 100, noise=3.0)
    assert np.linalg.norm(samples, axis=1).mean() == pytest.approx(1, rel=0.02)
    assert np.linalg.norm(samples - samples.mean(0), axis=1).mean() == pytest.approx(3 / 10**0.5, rel=0.02)
    spread = np.linalg.norm(directions.sample_gradients(4000, 100, noise=0.1, spread=0.7), axis=1)
    assert np.log(spread).std() == pytest.approx(0.7, rel=0.05)


def test_only_auto_s_keeps_the_order_of_norms_below_the_threshold() -> None:
    norms = np.geomspace(0.01, 100, 50)
    assert (np.diff(directions.norms_after(norms, rules.auto_s(0.1))) > 0).all()
    assert np.allclose(directions.norms_after(norms, rules.auto_v), 1.0)
    assert np.allclose(directions.norms_after(norms, rules.abadi), np.minimum(norms, 1.0))
