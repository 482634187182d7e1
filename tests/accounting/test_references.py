"""Numbers that others published, from their papers, documentation and test suites."""

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import special

from accounting.dp_events import dp_event
from clipless.accounting import ACCOUNTANTS, StepEvent, epsilon, noise_multiplier

# Upper bounds at delta = 1e-6 for (noise multiplier, rate, steps), "computed from github.com/microsoft/prv_accountant",
# the code of Gopi, Lee and Wutschitz, "Numerical composition of differential privacy" (2021): the table in
# opacus/tests/prv_accountant.py of github.com/pytorch/opacus, shortened to nine digits. They were computed with
# eps_error = 0.01 and delta_error = 1e-9, so the true epsilon lies at most 0.02 below, but for the error in delta.
PRV_DELTA, PRV_GAP = 1e-6, 0.02
PRV = {
    (0.8, 0.001, 100): 0.270403364,
    (1.5, 0.001, 100): 0.0393694193,
    (2.0, 0.001, 100): 0.0291045369,
    (3.0, 0.001, 100): 0.0215200934,
    (0.8, 0.05, 100): 6.74105194,
    (1.5, 0.05, 100): 1.95385314,
    (2.0, 0.05, 100): 1.28363738,
    (3.0, 0.05, 100): 0.76793379,
    (0.8, 0.2, 100): 24.3336642,
    (1.5, 0.2, 100): 8.49897786,
    (2.0, 0.2, 100): 5.67205561,
    (3.0, 0.2, 100): 3.38122051,
    (0.8, 0.001, 1000): 0.477771266,
    (1.5, 0.001, 1000): 0.09982066,
    (2.0, 0.001, 1000): 0.0712187825,
    (3.0, 0.001, 1000): 0.0476159309,
    (0.8, 0.05, 1000): 19.5258428,
    (1.5, 0.05, 1000): 6.20996925,
    (2.0, 0.05, 1000): 4.17279987,
    (3.0, 0.05, 1000): 2.52757433,
    (0.8, 0.001, 20000): 1.29600926,
    (1.5, 0.001, 20000): 0.437005109,
    (2.0, 0.001, 20000): 0.30583794,
    (3.0, 0.001, 20000): 0.194031031,
    (0.8, 0.05, 20000): 140.65521,
    (1.5, 0.05, 20000): 38.3066179,
    (2.0, 0.05, 20000): 24.4217186,
    (3.0, 0.05, 20000): 13.9611147,
    (0.8, 0.001, 50000): 2.03451481,
    (1.5, 0.001, 50000): 0.704218385,
    (2.0, 0.001, 50000): 0.49135491,
    (3.0, 0.001, 50000): 0.309694161,
    (0.8, 0.05, 50000): 291.384325,
    (1.5, 0.05, 50000): 73.1901767,
    (2.0, 0.05, 50000): 45.2369959,
    (3.0, 0.05, 50000): 24.9420056,
    (0.8, 0.001, 100000): 2.92462212,
    (1.5, 0.001, 100000): 1.01528808,
    (2.0, 0.001, 100000): 0.706719901,
    (3.0, 0.001, 100000): 0.443671721,
}


@pytest.mark.parametrize("problem", PRV, ids=str)
def test_pld_lies_between_the_bounds_of_the_prv_accountant(problem):
    noise, rate, steps = problem
    upper = PRV[problem]
    # What an error of 1e-9 in delta does to the lower bound.
    shifted = epsilon(noise, rate, steps, PRV_DELTA) - epsilon(noise, rate, steps, PRV_DELTA + 2e-9)
    spent = epsilon(noise, rate, steps, PRV_DELTA)
    assert upper - PRV_GAP - abs(shifted) - 1e-4 * upper <= spent <= 1.001 * upper


@pytest.mark.parametrize("problem", PRV, ids=str)
def test_rdp_stays_above_the_lower_bound_of_the_prv_accountant(problem):
    assert epsilon(*problem, PRV_DELTA, "rdp") > PRV[problem] - PRV_GAP


def assert_renyi(spent, published, tight):
    """Others try a fixed list of orders and convert with some loss: ours is up to 3 % below, and never below the truth."""
    assert tight < spent
    assert 0.97 * published <= spent <= (1 + 1e-6) * published


def test_opacus_agrees():
    """opacus/tests/accountants_test.py of github.com/pytorch/opacus."""
    tight = epsilon(1.5, 0.04, int(90 / 0.04), 1e-5, "pld")
    assert 6.777395712150674 - PRV_GAP <= tight <= 6.777395712150674
    assert_renyi(epsilon(1.5, 0.04, int(90 / 0.04), 1e-5, "rdp"), 7.32911117143, tight)
    assert 6.59 < epsilon(1.5, 0.04, int(90 // 0.04), 1e-5, "gdp") < 6.6


@pytest.mark.parametrize(
    ("accountant", "steps", "noise"),
    [("rdp", 2250, 1.416), ("rdp", 2000, 1.3562), ("gdp", 2250, 1.3232), ("pld", 2250, 1.3476), ("pld", 2000, 1.2915)],
)
def test_opacus_calibrates_alike(accountant, steps, noise):
    """Its search stops within 0.01 of epsilon = 8, ours within 0.8 %."""
    assert noise_multiplier(8.0, 1e-5, 0.04, steps, accountant) == pytest.approx(noise, rel=0.01)


# compute_dp_sgd_privacy_test.py of github.com/tensorflow/privacy: records, batch, noise, epochs, delta -> epsilon by RDP.
@pytest.mark.parametrize(
    ("records", "batch", "noise", "epochs", "delta", "published"),
    [
        (60_000, 150, 1.3, 15, 1e-5, 0.7242234026109595),
        (100_000, 100, 1.0, 30, 1e-7, 1.4154988495444845),
        (100_000_000, 1024, 0.1, 10, 1e-7, 5907982.31138195),
    ],
)
def test_tensorflow_privacy_agrees(records, batch, noise, epochs, delta, published):
    problem = (noise, batch / records, math.ceil(epochs * records / batch), delta)
    if published < 1000:
        assert_renyi(epsilon(*problem, "rdp"), published, epsilon(*problem, "pld"))
    else:  # the best order lies below any that it tries
        assert epsilon(*problem, "rdp") <= published


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta", "tight", "renyi"),
    [
        # The statement for 10,000 examples, 64 in a batch, noise 2 which microbatches halve, 5 epochs.
        (1.0, 64 / 10_000, math.ceil(5 * 10_000 / 64), 1e-6, 1.199, 1.6165),
        # 1.2 epochs at rate 0.01.
        (0.7, 0.01, 120, 1e-5, 2.4612381, 3.2391922),
    ],
)
def test_more_of_tensorflow_privacy(noise, rate, steps, delta, tight, renyi):
    """compute_dp_sgd_privacy_lib_test.py, with Poisson sampling."""
    ours = epsilon(noise, rate, steps, delta, "pld")
    assert ours == pytest.approx(tight, rel=5e-3)
    assert_renyi(epsilon(noise, rate, steps, delta, "rdp"), renyi, ours)


# records, batch, noise, steps -> epsilon at delta = 1 / (1.1 * records), by Gaussian DP: Bu, Wang and Long, "On the
# Convergence and Calibration of Deep Learning with Differential Privacy", the wine and the housing data.
@pytest.mark.parametrize(
    ("records", "batch", "noise", "steps", "low", "high"),
    [(1279, 1279, 35.0, 2000, 4.395, 4.405), (18_576, 256, 1.0, 3650, 4.41, 4.43)],
)
def test_gdp_agrees_with_the_published_values(records, batch, noise, steps, low, high):
    assert low < epsilon(noise, batch / records, steps, 1 / (1.1 * records), "gdp") < high


@pytest.mark.parametrize(("noise", "epochs", "published"), [(1.06, 20, 1.34), (0.638, 70, 8.68)])
def test_gdp_agrees_with_its_authors(noise, epochs, published):
    """Bu, Dong, Long and Su, "Deep Learning with Gaussian Differential Privacy" (2020), figure 4; noise is rounded."""
    steps = round(epochs * 60_000 / 256)
    assert epsilon(noise, 256 / 60_000, steps, 1e-5, "gdp") == pytest.approx(published, rel=0.01)


def exact_delta(mu, spent):
    """Balle and Wang (2018), theorem 8: the delta of a Gaussian mechanism."""
    return special.ndtr(mu / 2 - spent / mu) - math.exp(spent) * special.ndtr(-mu / 2 - spent / mu)


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_one_full_batch_is_the_analytic_gaussian_mechanism(mu, delta, accountant):
    spent = epsilon(1 / mu, 1.0, 1, delta, accountant)
    assert exact_delta(mu, spent) <= delta * (1 + 1e-6)
    if accountant != "rdp":
        assert spent == 0 or exact_delta(mu, spent * (1 - 1e-6)) > delta * (1 - 1e-6)


def test_noise_for_exactly_1_by_dp_accounting():
    """rdp_privacy_accountant_test.py: 4.530877117 was "chosen to obtain exactly (1, 1e-6)-DP"; by Rényi DP."""
    assert epsilon(4.530877117, 1.0, 1, 1e-6, "rdp") == pytest.approx(1.0, rel=1e-3)


def test_a_subsampled_gaussian_of_dp_accounting():
    """pld_privacy_accountant_test.py: three steps at rate 0.2 and noise 0.5 have delta 0.15594 at epsilon 1."""
    assert epsilon(0.5, 0.2, 3, 0.15594) == pytest.approx(1.0, rel=5e-3)


@pytest.mark.parametrize(
    "problem", [(0.7, 0.01, 120, 1e-5), (1.1, 0.01, 1000, 1e-5), (4.0, 0.3, 200, 1e-5), (0.8, 0.05, 1, 1e-6)], ids=str
)
def test_dp_accounting_agrees(problem):
    noise, rate, steps, delta = problem
    tight, renyi = PLDAccountant(value_discretization_interval=1e-4), RdpAccountant()
    for accountant in (tight, renyi):
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps)
    assert epsilon(*problem, "pld") == pytest.approx(tight.get_epsilon(delta), rel=5e-3)
    assert_renyi(epsilon(*problem, "rdp"), renyi.get_epsilon(delta), epsilon(*problem, "pld"))


def test_a_mixed_run_of_dp_accounting():
    reference = PLDAccountant()
    steps = [(StepEvent(0.01, 1.0), 300), (StepEvent(0.02, 1.5, (4.0,)), 200), (StepEvent(0.005, 0.8), 100)]
    for event, count in steps:
        reference.compose(dp_event(event), count)
    assert ACCOUNTANTS["pld"].epsilon(steps, 1e-5) == pytest.approx(reference.get_epsilon(1e-5), rel=0.01)
