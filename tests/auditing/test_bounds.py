"""Bounds from error rates and from guesses: against simulation of mechanisms whose epsilon is known."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
from scipy import special, stats

import clipless
from clipless.accounting.gaussian import gaussian_epsilon
from clipless.auditing import (
    Rates,
    SampledGaussian,
    clopper_pearson,
    gaussian_mu,
    mahloujifar_epsilon,
    plain_epsilon,
    steinke_epsilon,
)
from clipless.auditing.one_run_bounds import gaussian_refuted, steinke_p_value
from clipless.auditing.rates import gaussian_pair_mu, rates
from clipless.auditing.verdict import judge_canaries


@pytest.mark.parametrize(("events", "trials"), [(0, 10), (3, 10), (10, 10), (17, 500)])
def test_clopper_pearson_is_where_the_binomial_tail_is_the_level(events: int, trials: int) -> None:
    bound = float(clopper_pearson(events, trials, 0.95))
    assert events == trials or stats.binom.cdf(events, trials, bound) == pytest.approx(0.05)
    assert events < trials or bound == 1


def test_rates_below_guessing_prove_nothing() -> None:
    assert plain_epsilon(0.5, 0.5, 0.0) == 0
    assert SampledGaussian().noise_multiplier(0.6, 0.6) == math.inf
    assert SampledGaussian().epsilon(math.inf, 1e-5) == 0


@pytest.mark.parametrize("sample_rate", [1.0, 0.3])
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
def test_the_multiplier_of_one_step_is_found_from_its_exact_error_rates(sample_rate: float, multiplier: float) -> None:
    fpr = special.ndtr(-1.0)
    fnr = (1 - sample_rate) * special.ndtr(1.0) + sample_rate * special.ndtr(1.0 - 1 / multiplier)
    assert SampledGaussian(sample_rate).noise_multiplier(fpr, fnr) == pytest.approx(multiplier)


def test_several_sampled_steps_allow_what_the_attack_on_them_attains_and_little_more() -> None:
    """The log-likelihood test on 200,000 simulated runs of 6 steps, at multiplier 1 and rate 0.3."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2, 200_000, 6))
    noise[1] += rng.random(noise[1].shape) < 0.3
    scores = np.log(0.7 + 0.3 * np.exp(noise - 0.5)).sum(2)
    threshold = np.median(scores)
    fpr, fnr = float((scores[0] > threshold).mean()), float((scores[1] <= threshold).mean())
    found = SampledGaussian(0.3, 6).noise_multiplier(fpr, fnr, near=1.0)
    assert 0.97 < found < 1.15


def test_a_record_seen_more_often_than_it_is_drawn_is_explained_by_no_noise() -> None:
    assert SampledGaussian(0.25, 4).noise_multiplier(0.01, 0.05) == 0
    assert SampledGaussian(0.25, 4).epsilon(0, 1e-5) == math.inf
    assert SampledGaussian(0.25).epsilon(SampledGaussian(0.25).noise_multiplier(0.01, 0.05), 1e-5) == math.inf


def test_the_threshold_is_chosen_on_other_scores_than_those_that_count() -> None:
    rng = np.random.default_rng(1)
    outside, inside = rng.normal(size=500), rng.normal(size=500)
    outside[:200], inside[:200] = -9, 9
    found = rates(outside, inside, SampledGaussian())
    assert (found.negatives, found.positives) == (300, 300)
    assert sum(found.upper(0.95)) > 1
    with pytest.raises(clipless.InvalidArgument, match="play more"):
        rates(outside[:10], inside, SampledGaussian())


def test_the_pair_bound_fails_as_rarely_as_it_says() -> None:
    """500 samples at 90 %: 50 failures expected, 72 or more have a chance of 0.1 %."""
    rng = np.random.default_rng(2)
    bounds = [gaussian_pair_mu(rng.normal(size=100), rng.normal(size=100) + 0.7, 0.9) for _ in range(500)]
    assert 25 < sum(bound > 0.7 for bound in bounds) < 72
    assert gaussian_pair_mu(np.zeros(5), np.ones(5), 0.9) == math.inf


def test_steinke_without_delta_is_the_binomial_tail() -> None:
    assert steinke_p_value(50, 20, 15, 1.0, 0.0) == pytest.approx(stats.binom.sf(14, 20, special.expit(1.0)))
    assert steinke_epsilon(50, 20, 0, 1e-5) == 0


def test_steinke_with_delta_is_the_published_formula() -> None:
    """Theorem 5.2, written out: beta + 2·m·delta·max_i P[v - i <= W < v]/i."""
    m, r, v, epsilon, delta = 40, 30, 24, 0.8, 1e-3
    w = stats.binom(r, special.expit(epsilon))
    worst = max(sum(w.pmf(k) for k in range(v - i, v)) / i for i in range(1, v + 1))
    assert steinke_p_value(m, r, v, epsilon, delta) == pytest.approx(w.sf(v - 1) + 2 * m * delta * worst)


def guesses_of_randomised_response(epsilon: float, delta: float, canaries: int, rng: np.random.Generator) -> int:
    """Right guesses of coins that are each told with probability delta, and else by randomised response at epsilon."""
    told = rng.random(canaries) < delta
    return int((told | (rng.random(canaries) < special.expit(epsilon))).sum())


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (2.0, 0.0), (1.0, 1e-3)])
def test_steinke_holds_for_randomised_response_and_is_close(epsilon: float, delta: float) -> None:
    """The mechanism for which the theorem is tight: 300 audits of 2000 canaries at 95 %. 28 failures or more would have a
    chance of 0.1 % if each failed with 5 %."""
    rng = np.random.default_rng(3)
    bound = cache(lambda right: steinke_epsilon(2000, 2000, right, delta))
    bounds = [bound(guesses_of_randomised_response(epsilon, delta, 2000, rng)) for _ in range(300)]
    assert sum(bound > epsilon for bound in bounds) < 28
    assert np.median(bounds) > (0.85 if delta else 0.75) * epsilon - (0.1 if delta else 0)


def exact_tail(mu: float, canaries: int, guesses: int, right: int, trials: int, rng: np.random.Generator) -> float:
    """The chance of so many right guesses by the best attack on independent Gaussian canaries, simulated."""
    coins = rng.random((trials, canaries)) < 0.5
    order = np.argsort(rng.normal(size=coins.shape) + mu * coins, axis=1)
    half = guesses // 2
    sorted_coins = np.take_along_axis(coins, order, axis=1)
    hits = (~sorted_coins[:, :half]).sum(1) + sorted_coins[:, canaries - half :].sum(1)
    return float((hits >= right).mean())


@pytest.mark.parametrize(("mu", "guesses"), [(0.5, 100), (1.0, 20), (1.0, 100), (2.0, 30)])
def test_the_recursion_never_refutes_a_gaussian_that_attains_the_level(mu: float, guesses: int) -> None:
    """For every number of right guesses: if the true chance is above the level, mu is not refuted at that level."""
    rng = np.random.default_rng(4)
    for right in range(guesses // 2, guesses + 1, max(1, guesses // 10)):
        chance = exact_tail(mu, 100, guesses, right, 4000, rng)
        if chance > 0.06:
            assert not gaussian_refuted(100, guesses, right, mu, 0.05)
    assert gaussian_refuted(100, guesses, guesses, 0.01, 0.05)


def test_the_recursion_against_all_distributions_of_a_small_game() -> None:
    """One canary, one guess: a right guess has a chance of at most Φ(mu/2), so the level is refuted just above it."""
    for mu in (0.3, 1.0, 2.5):
        best = float(special.ndtr(mu / 2))
        assert not gaussian_refuted(1, 1, 1, mu, best - 1e-6)
        assert gaussian_refuted(1, 1, 1, mu, best + 1e-6)


@pytest.mark.parametrize("mu", [0.5, 1.5])
def test_the_f_dp_bound_holds_for_gaussian_canaries_and_beats_steinke(mu: float) -> None:
    """200 audits of 1000 independent Gaussian canaries, at 90 %: 20 failures expected at most, 34 or more have a chance of
    0.1 %. At delta 1e-5 the analysis that knows the shape proves more."""
    rng = np.random.default_rng(5)
    bounds, others = [], []
    for _ in range(200):
        coins = rng.random(1000) < 0.5
        order = np.argsort(rng.normal(size=1000) + mu * coins)
        right = int((~coins[order[:50]]).sum() + coins[order[-50:]].sum())
        bounds.append(gaussian_mu(1000, 100, right, 0.9))
        others.append(steinke_epsilon(1000, 100, right, 1e-5, 0.9))
    assert sum(bound > mu for bound in bounds) < 34
    assert np.median(bounds) > 0.5 * mu
    assert gaussian_epsilon(float(np.median(bounds)), 1e-5) > np.median(others)


def test_more_right_guesses_prove_more() -> None:
    for first, second in itertools.pairwise(range(50, 101, 10)):
        assert steinke_epsilon(200, 100, first, 1e-5) <= steinke_epsilon(200, 100, second, 1e-5)
        assert mahloujifar_epsilon(200, 100, first, 1e-5) <= mahloujifar_epsilon(200, 100, second, 1e-5)
    with pytest.raises(clipless.InvalidArgument, match="impossible"):
        steinke_epsilon(10, 20, 5, 0.0)


def test_all_analyses_of_canaries_together_fail_as_rarely_as_they_say() -> None:
    """30 audits of 1000 ideal canaries of one full step at multiplier 1, at 80 %: 6 failures at most expected, 14 or more
    have a chance of 0.1 %."""
    rng = np.random.default_rng(6)
    family, claimed = SampledGaussian(), SampledGaussian().epsilon(1.0, 1e-5)
    found = []
    for _ in range(30):
        coins = rng.random(1000) < 0.5
        found.append(judge_canaries(rng.normal(size=1000) + coins, coins, claimed, 1e-5, 0.8, (family, 1.0)))
    assert sum(verdict.exceeded for verdict in found) < 14
    assert np.median([verdict.independent for verdict in found]) > np.median([verdict.mahloujifar for verdict in found])


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2, 0.5])
def test_both_bounds_hold_together_with_the_confidence_that_is_claimed(rate: float, confidence: float) -> None:
    """Over everything that two independent attacks of 200 games can show, by their exact probabilities."""
    games = 200
    shown = np.arange(games + 1)
    holds = [[bound >= rate for bound in Rates(k, games, k, games).upper(confidence)] for k in shown]
    probability = stats.binom.pmf(shown, games, rate)
    first, second = (float(probability[np.array(one)].sum()) for one in zip(*holds, strict=True))
    assert first * second >= confidence


def test_rates_have_an_upper_bound_each() -> None:
    fpr, fnr = Rates(5, 100, 20, 100).upper(0.95)
    assert 0.05 < fpr < 0.13
    assert 0.2 < fnr < 0.31
