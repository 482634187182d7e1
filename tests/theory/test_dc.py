"""DC's E(C) against simulation, its minimiser against a search, the bound against simulated descent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from clipless.arrays import Floats
from clipless.errors import InvalidArgument
from clipless.theory import dc
from clipless.theory.rules import abadi


def true_error(threshold: float, gradients: Floats, noise_multiplier: float, batch: float) -> float:
    """The mean square distance of the private mean gradient of these rows from their mean: at most E(C)."""
    norms = np.linalg.norm(gradients, axis=1)
    cut = ((1 - abadi(norms, threshold))[:, None] * gradients).mean(0)
    return float(dc.variance(threshold, noise_multiplier, gradients.shape[1], batch) + cut @ cut)


@given(
    norms=st.lists(st.floats(0.001, 100), min_size=1, max_size=30),
    sigma=st.floats(0.01, 10),
    dimension=st.integers(1, 10_000),
    batch=st.integers(1, 512),
)
def test_best_threshold_minimises_the_error(norms: list[float], sigma: float, dimension: int, batch: int) -> None:
    values = np.array(norms)

    def error(threshold: float) -> float:
        return float(dc.expected_error(threshold, values, sigma, dimension, batch))

    found = dc.best_threshold(values, sigma, dimension, batch)
    searched = minimize_scalar(error, bounds=(0, float(values.max())), method="bounded", options={"xatol": 1e-9})
    assert error(found) <= searched.fun * (1 + 1e-9)
    assert error(found) <= min(error(found * 1.001), error(found * 0.999))


def test_without_noise_nothing_is_clipped() -> None:
    with pytest.raises(InvalidArgument, match="no norms"):
        dc.best_threshold(np.array([]), 1.0, 10, 4)
    assert dc.best_threshold(np.array([1.0, 5.0, 2.0]), 0.0, 10, 4) == 5.0


def test_error_is_variance_and_bias_over_many_draws() -> None:
    """The distance of noised clipped means from the mean, over 20,000 draws of noise, within five standard errors."""
    draws = np.random.default_rng(0)
    gradients = draws.normal(size=(16, 6)) * 3 + 1
    for threshold in (0.5, 4.0, 50.0):
        clipped = (abadi(np.linalg.norm(gradients, axis=1), threshold)[:, None] * gradients).mean(0)
        noise = 1.3 * threshold / 16 * draws.normal(size=(20_000, 6))
        squares = ((clipped + noise - gradients.mean(0)) ** 2).sum(1)
        exact = true_error(threshold, gradients, 1.3, 16)
        assert exact == pytest.approx(squares.mean(), abs=5 * squares.std() / np.sqrt(20_000))
        bound = float(dc.expected_error(threshold, np.linalg.norm(gradients, axis=1), 1.3, 6, 16))
        assert exact <= bound * (1 + 1e-12)


def test_error_is_exact_where_all_gradients_agree() -> None:
    gradients = np.tile([3.0, 4.0], (8, 1))
    assert true_error(2.0, gradients, 0.7, 8) == pytest.approx(
        float(dc.expected_error(2.0, np.full(8, 5.0), 0.7, 2, 8))
    )


def test_bound_holds_for_simulated_descent_and_the_best_thresholds_minimise_it() -> None:
    """Mean estimation on the full batch, 100 runs: the mean of ‖∇L‖² over steps and runs is below the bound."""
    draws = np.random.default_rng(1)
    records = draws.normal(size=(32, 5)) + np.array([3.0, 0, 0, 0, 0])
    rate, steps, sigma, runs = 0.5, 40, 2.0, 100
    bounds = {}
    for name, fixed in (("best", None), ("small", 0.2), ("large", 20.0)):
        w, squares, errors = np.zeros((runs, 5)), [], []
        for _ in range(steps):
            gradients = w[:, None] - records
            norms = np.linalg.norm(gradients, axis=2)
            bound = [fixed or dc.best_threshold(each, sigma, 5, 32) for each in norms]
            errors.append([float(dc.expected_error(c, n, sigma, 5, 32)) for c, n in zip(bound, norms, strict=True)])
            factors = np.stack([abadi(n, c) for c, n in zip(bound, norms, strict=True)])
            squares.append((gradients.mean(1) ** 2).sum(1))
            noise = sigma * np.array(bound)[:, None] / 32 * draws.normal(size=w.shape)
            w = w - rate * ((factors[..., None] * gradients).mean(1) + noise)
        gap = 0.5 * float((records.mean(0) ** 2).sum())
        bounds[name] = dc.convergence_bound(gap, rate, steps, np.array(errors))
        assert np.mean(squares) <= bounds[name]
    assert bounds["best"] < min(bounds["small"], bounds["large"])


def test_bound_with_drawn_batches_holds() -> None:
    """Noise on the batch's mean gradient beside clipping: twice the sum of both errors, on a quadratic, 500 runs."""
    draws = np.random.default_rng(2)
    runs, rate, steps, spread, error = 500, 0.3, 60, 0.4, 0.3
    w, squares = np.full((runs, 1), 2.0), []
    for _ in range(steps):
        squares.append(float((w**2).mean()))
        w = w - rate * (w + spread * draws.normal(size=w.shape) + error)
    bound = dc.convergence_bound(2.0, rate, steps, error**2, sampling=spread**2)
    assert np.mean(squares) <= bound
    assert bound == pytest.approx(4 / (rate * steps) + 2 * (0.09 + 0.16))
