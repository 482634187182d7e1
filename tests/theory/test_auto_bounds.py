"""AUTO's bounds against vectors, searches, linear programs and simulated training."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq, linprog

from clipless.errors import InvalidArgument
from clipless.theory.auto_bounds import (
    alignment,
    auto_s_bound,
    auto_v_bound,
    concave_inverse,
    inverse_measure,
    least_alignment,
    measure,
    measure_limit,
    optimisation_term,
    sgd_bound,
)
from clipless.theory.rules import auto_s, auto_v

LATE = np.geomspace(1e10, 1e14, 9)
FIGURE_CONSTANTS = [(25.0, 0.01), (1.0, 0.01), (1.0, 0.1), (1.0, 1.0), (0.1, 0.01)]


def log_log_slope(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """The slope of the line of least squares through log y against log x."""
    return float(np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)[0])


@given(c=st.floats(-1, 1), r=st.floats(0.01, 20), gamma=st.sampled_from([0.0, 0.01, 0.5]), length=st.floats(0.1, 10))
def test_alignment_is_the_component_of_two_clipped_gradients(c: float, r: float, gamma: float, length: float) -> None:
    gradient = np.array([length, 0.0])
    noise = r * length * np.array([c, math.sqrt(1 - c * c)])
    pair = np.stack([gradient + noise, gradient - noise])
    norms = np.linalg.norm(pair, axis=1)
    factors = auto_s(gamma)(norms, 1.0) if gamma else auto_v(norms, 1.0)
    along = float((factors[:, None] * pair).sum(0) @ gradient) / length
    if norms.min() > 1e-6:
        assert alignment(c, r, gamma / length) == pytest.approx(along, abs=1e-9)


@pytest.mark.parametrize("r", [0.01, 0.3, 0.7, 0.7072, 0.75, 0.8, 0.95, 0.999, 1.5, 4.0])
@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.3, 2.0])
def test_least_alignment_is_the_minimum_on_a_fine_grid(r: float, gamma: float) -> None:
    grid = np.linspace(0, 1, 200_001)[1:]
    values = alignment(grid, r, gamma)
    assert least_alignment(r, gamma) == pytest.approx(float(values.min()), rel=1e-6, abs=1e-9)
    assert least_alignment(r, gamma) <= values.min() + 1e-12


def test_least_alignment_falls_with_the_noise_and_stays_positive() -> None:
    """So Markov's inequality may put r in place of every smaller ratio, and what exceeds r costs nothing."""
    for gamma in (0.0, 0.05, 1.0):
        values = [least_alignment(float(r), gamma) for r in np.geomspace(0.01, 50, 60) if r < 1 or gamma]
        assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(values))
        assert min(values) > 0


@pytest.mark.parametrize("r", [1.0, 1.01, 1.5, 4.0, 60.0])
@pytest.mark.parametrize(("xi", "gamma"), FIGURE_CONSTANTS)
def test_measure_is_the_least_gain_and_grows(r: float, xi: float, gamma: float) -> None:
    x = np.geomspace(1e-6, 1e4, 200)
    values = measure(x, r, xi, gamma)
    assert (np.diff(values) > 0).all()
    assert (values < measure_limit(r, gamma)).all()
    for length, value in list(zip(x, values, strict=True))[::40]:
        least = least_alignment(r, gamma / (length + xi / r)) if r > 1 else alignment(1, 1, gamma / (length + xi))
        assert value == pytest.approx(least * length, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("r", [1.0, 1.01, 1.5, 4.0, 60.0])
@pytest.mark.parametrize(("xi", "gamma"), FIGURE_CONSTANTS)
def test_inverse_is_what_a_root_finder_finds(r: float, xi: float, gamma: float) -> None:
    top = min(measure_limit(r, gamma), 100.0)
    for share in (1e-12, 1e-3, 0.3, 0.9, 0.99):
        root = brentq(lambda x, y=share * top: float(measure(x, r, xi, gamma)) - y, 0, 1e9, xtol=1e-300, rtol=1e-13)
        assert inverse_measure(share * top, r, xi, gamma) == pytest.approx(root, rel=1e-6)
    assert inverse_measure(0.0, r, xi, gamma) == 0
    if r > 1:
        assert math.isinf(inverse_measure(measure_limit(r, gamma) * 1.0001, r, xi, gamma))


@pytest.mark.parametrize(
    ("r", "xi", "gamma", "longest"), [(1.5, 1.0, 0.01, 30.0), (4.0, 25.0, 0.01, 30.0), (1.2, 0.01, 1.0, 1.5)]
)
def test_envelope_is_the_largest_mean_length_at_a_mean_gain(r: float, xi: float, gamma: float, longest: float) -> None:
    """A linear program over all laws of the gradient's length: maximise E x with E M(x) = y. The last one is no chord."""
    lengths = np.linspace(0, longest - xi / r, 1500)
    gains = measure(lengths, r, xi, gamma)
    for share in (0.05, 0.4, 0.8):
        y = share * gains[-1]
        solved = linprog(-lengths, A_eq=np.stack([np.ones_like(gains), gains]), b_eq=[1.0, y])
        found = float(concave_inverse(y, r, xi, gamma, longest))
        assert found == pytest.approx(-solved.fun, rel=2e-5)
        assert found >= inverse_measure(y, r, xi, gamma) * (1 - 1e-5)
        assert (found > 1.01 * share * lengths[-1]) == (gamma == 1.0)
    assert concave_inverse(gains[-1] * 2, r, xi, gamma, longest) == pytest.approx(lengths[-1])


def test_envelope_over_gradients_of_any_length_is_infinite() -> None:
    """The linear program's value grows without end with the longest gradient: (C.8) has a pole."""
    values = [float(concave_inverse(1e-3, 1.5, 1.0, 0.01, longest)) for longest in (10.0, 1e3, 1e5)]
    assert values[1] > 50 * values[0]
    assert values[2] > 50 * values[1]
    assert math.isinf(concave_inverse(1e-3, 1.5, 1.0, 0.01, math.inf))
    assert concave_inverse(0.0, 1.5, 1.0, 0.01, math.inf) == 0


@pytest.mark.parametrize(("xi", "gamma"), FIGURE_CONSTANTS)
def test_auto_s_has_slope_minus_a_quarter(xi: float, gamma: float) -> None:
    bounds = [auto_s_bound(10 / math.sqrt(steps), xi, gamma) for steps in LATE]
    assert log_log_slope(LATE, bounds) == pytest.approx(-0.25, abs=0.02)


def test_rigorous_auto_s_has_slope_minus_a_sixth() -> None:
    steps = np.geomspace(1e14, 1e18, 5)
    bounds = [auto_s_bound(10 / math.sqrt(t), 1.0, 0.01, longest=30.0) for t in steps]
    assert log_log_slope(steps, bounds) == pytest.approx(-1 / 6, abs=0.01)
    assert auto_s_bound(10.0, 1.0, 0.01, longest=5.0) <= 5.0 * (1 + 1e-12), "no gradient is longer than the longest"


@pytest.mark.parametrize("xi", [0.1, 1.0, 25.0])
def test_auto_v_never_falls_below_the_noise(xi: float) -> None:
    bounds = [auto_v_bound(10 / math.sqrt(steps), xi) for steps in np.geomspace(1, 1e20, 21)]
    assert min(bounds) >= xi
    assert bounds[-1] == pytest.approx(xi, rel=1e-6)
    assert all(later <= earlier for earlier, later in itertools.pairwise(bounds))
    assert auto_s_bound(10 / math.sqrt(1e14), xi) < xi


def test_bounds_are_the_minimum_over_ratios() -> None:
    fine = np.geomspace(1, 1e5, 200_001)
    for term in (1.0, 0.01, 1e-5):
        brute = (2.0 / fine + inverse_measure(term, fine, 2.0, 0.01)).min()
        assert auto_s_bound(term, 2.0, 0.01) == pytest.approx(float(brute), rel=1e-6)
        coarse = np.linspace(0.001, 1, 5001)
        brute = min(2.0 / r + term / least_alignment(float(r)) for r in coarse)
        assert auto_v_bound(term, 2.0) == pytest.approx(brute, rel=1e-4)


@pytest.mark.parametrize("arguments", [(0.1, 1.0, 0.0), (0.1, -1.0, 0.01), (-0.1, 1.0, 0.01)])
def test_arguments_without_a_bound_are_refused(arguments: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidArgument, match="auto_v_bound"):
        auto_s_bound(*arguments)


def test_sgd_bound_is_its_formula_and_has_slope_minus_a_quarter() -> None:
    assert sgd_bound(16, 2.0, 3.0, 4.0, 8) == pytest.approx(0.5 * math.sqrt(14))
    assert log_log_slope(LATE, [sgd_bound(t, 1, 1, 1, 1) for t in LATE]) == pytest.approx(-0.25)


def test_optimisation_term_covers_the_best_learning_rate() -> None:
    """The smoothness inequality gives (L₀−L*)/η₀ + η₀L(1+σ²d/B²)/2 for √T·½‖g‖f; its minimum is below half the term."""
    term = optimisation_term(steps=100, loss_gap=2.0, smoothness=3.0, noise_multiplier=2.0, dimension=50, batch=10)
    rates = np.geomspace(1e-3, 1e3, 100_001)
    least = (2.0 / rates + rates * 3.0 * (1 + 4.0 * 50 / 100) / 2).min()
    assert term * 10 / 2 == pytest.approx(least * math.sqrt(2), rel=1e-6)


def test_bounds_hold_for_simulated_training() -> None:
    """½‖w‖² with noise ±Δ on each record's gradient: min over steps of the mean ‖g‖ over 200 runs is below the bound."""
    draws = np.random.default_rng(0)
    runs, dimension, batch, sigma, xi, gamma, steps = 200, 4, 8, 0.5, 0.5, 0.5, 2000
    w = np.zeros((runs, dimension))
    w[:, 0] = 1.5
    loss_gap, lengths = 1.5**2 / 2, []
    rate = math.sqrt(loss_gap / (1 + sigma**2 * dimension / batch**2)) / math.sqrt(steps) / batch
    for _ in range(steps):
        lengths.append(np.linalg.norm(w, axis=1))
        noise = draws.normal(size=(runs, batch, dimension))
        noise *= xi / np.linalg.norm(noise, axis=2, keepdims=True)
        gradients = w[:, None] + noise
        factors = auto_s(gamma)(np.linalg.norm(gradients, axis=2), 1.0)
        w = w - rate * ((factors[..., None] * gradients).sum(1) + sigma * draws.normal(size=w.shape))
    least = min(float(each.mean()) for each in lengths)
    term = optimisation_term(steps, loss_gap, 1.0, sigma, dimension, batch)
    longest = float(np.max(lengths))
    assert least <= auto_s_bound(term, xi, gamma) <= auto_s_bound(term, xi, gamma, longest) < 1.5
