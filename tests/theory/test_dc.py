"""DC's E(C) against simulation, its minimiser against a search, the bounds against every batch and simulated descent, and
the moments accountant's noise against exact accountants."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from clipless import epsilon
from clipless.accounting.gaussian import gaussian_epsilon
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


def outcomes(records: int, share: float) -> Iterator[tuple[float, Floats]]:
    """Every Poisson batch of a few records with its probability."""
    for drawn in itertools.product((0.0, 1.0), repeat=records):
        chosen = np.array(drawn)
        yield float(np.prod(np.where(chosen == 1, share, 1 - share))), chosen


def one_step(seed: int, percentile: float) -> tuple[float, dc.Descent, Floats, float]:
    """One step on ½‖w − x_i‖² (L = 1) with the expectation over every batch and the noise written out.

    Returns ‖∇L‖², the step, the records' norms and ‖∇L‖.
    """
    draws = np.random.default_rng(seed)
    records, share, dimension = 8, 0.375, 3
    batch, rate, sigma = share * records, float(draws.uniform(0.05, 1.5)), float(draws.uniform(0, 2))
    gradients = draws.normal(size=(records, dimension)) * draws.uniform(0.1, 3, size=(records, 1)) + draws.normal()
    norms = np.linalg.norm(gradients, axis=1)
    threshold = float(np.sort(norms)[round(percentile * records) - 1])
    clipped, mean = abadi(norms, threshold)[:, None] * gradients, gradients.mean(0)
    noise = (sigma * threshold / batch) ** 2 * dimension
    squares = drop = 0.0
    for probability, chosen in outcomes(records, share):
        moved = chosen @ clipped / batch
        squares += probability * float(moved @ moved)
        drop += probability * float(rate * mean @ moved - rate**2 / 2 * (moved @ moved + noise))
    return (
        float(mean @ mean),
        dc.Descent(drop, rate, 1.0, np.array([squares]), np.array([threshold]), sigma, dimension, batch),
        norms,
        float(np.linalg.norm(mean)),
    )


@given(seed=st.integers(0, 10_000), percentile=st.sampled_from([0.25, 0.5, 0.75, 1.0]))
def test_theorem_3_holds_over_every_batch(seed: int, percentile: float) -> None:
    square, descent, norms, length = one_step(seed, percentile)
    longest = float(norms.max())
    assert (norms > descent.thresholds[0]).mean() == 1 - percentile
    by_error = dc.error_bound(descent, norms[None], longest)
    assert square <= dc.percentile_bound(descent, [length], percentile, longest) * (1 + 1e-9)
    assert square <= by_error * (1 + 1e-9)
    if percentile == 1:
        assert dc.percentile_bound(descent, [length], percentile, longest) == pytest.approx(by_error)


def test_theorem_3_needs_each_of_its_terms() -> None:
    """Without any one of them there are steps at which the rest is no bound."""
    missed = set()
    for seed, percentile in itertools.product(range(200), (0.25, 1.0)):
        square, descent, norms, length = one_step(seed, percentile)
        whole = dc.percentile_bound(descent, [length], percentile, float(norms.max()))
        noise = dc.variance(descent.thresholds, descent.noise_multiplier, descent.dimension, descent.batch)
        parts = {
            "drop": descent.loss_drop / descent.rate,
            "sums": descent.rate * descent.squares[0],
            "noise": descent.rate * float(noise[0]),
            "bias": length * (1 - percentile) * float(norms.max()),
        }
        assert whole == pytest.approx(sum(parts.values()))
        missed |= {name for name, part in parts.items() if whole - part < square * (1 - 1e-9)}
    assert missed == {"drop", "sums", "noise", "bias"}


def test_theorem_3_holds_along_simulated_descent() -> None:
    """300 runs of 25 steps with drawn batches: the terms are means over the runs, compared within the worst of them."""
    draws = np.random.default_rng(5)
    records = draws.normal(size=(40, 4)) * 2 + np.array([4.0, 0, 0, 0])
    share, rate, sigma, runs, steps, percentile = 0.25, 0.4, 1.5, 300, 25, 0.75
    batch, w = share * 40, np.zeros((runs, 4))
    first, squares, thresholds, lengths, cut, longest, gradient_squares = _losses(w, records), [], [], [], [], 0.0, []
    for _ in range(steps):
        gradients = w[:, None] - records
        norms = np.linalg.norm(gradients, axis=2)
        longest = max(longest, float(norms.max()))
        bounds = np.sort(norms, axis=1)[:, round(percentile * 40) - 1]
        factors = np.minimum(1, bounds[:, None] / norms)
        moved = ((draws.random(norms.shape) < share)[..., None] * factors[..., None] * gradients).sum(1) / batch
        squares.append(float((moved**2).sum(1).mean()))
        thresholds.append(float(np.sqrt((bounds**2).mean())))
        means = np.linalg.norm(gradients.mean(1), axis=1)
        lengths.append(float(means.mean()))
        gradient_squares.append(float((means**2).mean()))
        cut.append(float(np.maximum(norms - bounds[:, None], 0).mean()))
        w = w - rate * (moved + sigma * bounds[:, None] / batch * draws.normal(size=w.shape))
    drop = float((first - _losses(w, records)).mean())
    descent = dc.Descent(drop, rate, 1.0, np.array(squares), np.array(thresholds), sigma, 4, batch)
    found = float(np.mean(gradient_squares))
    assert found <= dc.percentile_bound(descent, lengths, percentile, longest)
    by_error = descent.without_bias() + longest * float(np.mean(cut))
    assert found <= by_error
    shifted = np.array(thresholds)[:, None] + np.array(cut)[:, None]
    assert dc.error_bound(descent, shifted, longest) == pytest.approx(by_error)
    worst = dc.worst_case_bound(drop, rate, steps, 1.0, longest, 1 - percentile, sigma, 4, batch, share)
    assert dc.percentile_bound(descent, lengths, percentile, longest) <= worst


def _losses(w: Floats, records: Floats) -> Floats:
    found: Floats = 0.5 * ((w[:, None] - records) ** 2).sum(2).mean(1)
    return found


def test_worst_case_needs_the_spread_of_the_batch() -> None:
    """All gradients alike and as long as G: E‖ḡ‖² over every batch is G²(1 + (1 − q)/B), which the paper takes for G²."""
    records, share, longest = 8, 0.375, 2.0
    batch = share * records
    exact = sum(p * (longest * chosen.sum() / batch) ** 2 for p, chosen in outcomes(records, share))
    assert exact == pytest.approx(longest**2 * (1 + (1 - share) / batch))
    bound = dc.worst_case_bound(0.0, 1.0, 1.0, 1.0, longest, 0.0, 0.0, 3, batch, share)
    assert bound == pytest.approx(exact)
    noisy = dc.worst_case_bound(3.0, 0.5, 4.0, 2.0, longest, 0.25, 1.5, 3, batch, share)
    assert noisy == pytest.approx(3 / 2 + 2 * 0.5 * (exact + 1.5**2 * longest**2 * 3 / batch**2) + 0.25 * longest**2)


def test_a_balanced_run_has_terms_of_one_size() -> None:
    records, epsilon, delta, dimension = 60_000.0, 2.0, 1e-5, 28_058.0
    steps, rate = dc.balanced_run(records, epsilon, delta, dimension)
    size = math.sqrt(dimension * math.log(1 / delta)) / (records * epsilon)
    noise = steps * rate * dimension * math.log(1 / delta) / (records * epsilon) ** 2
    assert [1 / (steps * rate), rate, noise] == pytest.approx([size] * 3)
    for batch, possible in ((401, False), (403, True)):
        if possible:
            assert dc.moments_noise_multiplier(epsilon, delta, batch / records, steps) > 0
        else:
            with pytest.raises(InvalidArgument, match="Theorem 4"):
                dc.moments_noise_multiplier(epsilon, delta, batch / records, steps)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 0.01, 0.5])
@pytest.mark.parametrize(("rate", "steps"), [(0.003, 300_000), (0.01, 100_000), (0.2, 1000), (0.5, 1000), (1.0, 10)])
def test_theorem_4_keeps_its_promise(accountant: str, share: float, delta: float, rate: float, steps: int) -> None:
    """What exact accountants count at the theorem's noise, at the largest ε that its conditions allow, and below."""
    target = share * min(0.999 * rate**2 * steps, 2 * math.log(1 / delta))
    noise = dc.moments_noise_multiplier(target, delta, rate, steps)
    spent = epsilon(noise, sample_rate=rate, steps=steps, delta=delta, accountant=accountant)
    assert spent <= target


def test_theorem_4_fails_beyond_the_condition_that_the_paper_lacks() -> None:
    """Full batches: with ε = T/2 < c₁q²T the formula's noise spends far more than ε, the more so the longer the run."""
    ratios = []
    for steps in (1_000, 100_000):
        target = steps / 2
        with pytest.raises(InvalidArgument, match=r"2 ln\(1/δ\) = 23"):
            dc.moments_noise_multiplier(target, 1e-5, 1.0, steps)
        noise = dc.NOISE * math.sqrt(steps * math.log(1e5)) / target
        ratios.append(gaussian_epsilon(math.sqrt(steps) / noise, 1e-5) / target)
    assert 1 < ratios[0] < ratios[1] / 10
