"""The price of tuning: hand arithmetic, dp-accounting's own numbers, the exact truth where there is one, properties."""

import itertools
import json
import math
import random

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from clipless import accounting
from clipless.accounting import Ledger, StepEvent, selection
from clipless.accounting.selection import (
    METHODS,
    GridSearch,
    LiuTalwar,
    PapernotSteinke,
    Repetitions,
    RunShape,
    SelectionEvent,
    method_named,
    price,
    prices,
    single_run,
    total,
)
from clipless.accounting.selection.papernot_steinke import ORDERS
from clipless.errors import CliplessError, InvalidArgument, InvalidType

FULL_BATCH = RunShape.of(1.0, 50)
SHAPES = (0.0, 0.5, 1.0, 3.0, math.inf)


def full_batch(noise: float) -> selection.Run:
    return FULL_BATCH.run(noise)


def test_the_arithmetic_of_dc_theorem_1_by_hand() -> None:
    method = LiuTalwar.covering(candidates=10)
    assert method.stop_probability == 1 / 20
    assert method.delta2 == 1e-20
    assert method.most_runs == 922  # 20 · 20 · ln 10 = 921.03
    epsilon, delta = method.total(run_epsilon=0.5, run_delta=5e-19)  # √(2δ₁) = 1e-9
    assert epsilon == pytest.approx(1.5 + 3e-9, rel=1e-14)
    assert delta == pytest.approx(3e-9 * 922 + 1e-20, rel=1e-12)
    assert method.run_delta(delta) == pytest.approx(5e-19, rel=1e-9)
    assert method.total(0.0, method.run_delta(1e-5))[1] <= 1e-5
    spent = method.epsilon([full_batch(60.0)] * 10, delta)
    alone = accounting.ACCOUNTANTS["pld"].epsilon(full_batch(60.0), method.run_delta(delta))
    assert spent == pytest.approx(3 * alone + 3e-9, rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.01, 1.1, 1000), (0.1, 4.0, 300), (1.0, 20.0, 40)])
def test_dp_accountings_own_numbers(shape: float, rate: float, noise: float, steps: int) -> None:
    step = GaussianDpEvent(noise) if rate == 1 else PoissonSampledDpEvent(rate, GaussianDpEvent(noise))
    theirs = RdpAccountant(ORDERS)
    theirs.compose(RepeatAndSelectDpEvent(SelfComposedDpEvent(step, steps), 12.0, shape))
    ours = PapernotSteinke(6, 12.0, shape).epsilon([RunShape.of(rate, steps).run(noise)] * 6, 1e-6)
    assert 0.97 * theirs.get_epsilon(1e-6) < ours <= theirs.get_epsilon(1e-6) * (1 + 1e-6)


def test_a_grid_is_one_long_run() -> None:
    assert total("grid", 2.0, 1e-5, 4, 0.01, 250) == accounting.epsilon(2.0, 0.01, 1000, 1e-5)
    assert total("grid", 2.0, 1e-5, 4, 0.01, 250, "rdp") == accounting.epsilon(2.0, 0.01, 1000, 1e-5, "rdp")


def best_of(repetitions: Repetitions, mu: float, x: np.ndarray) -> np.ndarray:
    """Exact density of the best of a random number of N(mu, 1) draws."""
    above, density = stats.norm.sf(x - mu), stats.norm.pdf(x - mu)
    if repetitions.shape == math.inf:
        return repetitions.mean * np.exp(-repetitions.mean * above) * density
    gamma, eta = repetitions.halting, repetitions.shape
    kept = gamma + (1 - gamma) * above
    if eta == 0:
        return density * (1 - gamma) / kept / -math.log(gamma)
    return density * eta * (1 - gamma) * kept ** (-eta - 1) / math.expm1(-eta * math.log(gamma))


def true_delta(repetitions: Repetitions, mu: float, epsilon: float) -> float:
    """The smallest delta at epsilon of releasing the best, whichever way the record's presence moves the runs."""
    x = np.linspace(-12, 12 + mu, 60_001)
    without, with_record = best_of(repetitions, 0.0, x), best_of(repetitions, mu, x)
    sides = ((without, with_record), (with_record, without))
    return max(float(integrate.simpson(np.clip(p - math.exp(epsilon) * q, 0, None), x=x)) for p, q in sides)


@pytest.mark.parametrize("mu", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("candidates", [2, 10, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_price_is_never_below_the_truth(mu: float, candidates: int, shape: float) -> None:
    """One full-batch Gaussian run whose score is its output: the law of the best is known in closed form."""
    run = RunShape.of(1.0, 1).run(1 / mu)
    method = PapernotSteinke.covering(candidates, shape=shape)
    claimed = method.epsilon([run] * candidates, 1e-5)
    assert true_delta(method.repetitions, mu, claimed) <= 1e-5
    assert true_delta(method.repetitions, mu, claimed / 5) > 1e-5
    if shape == 1:
        random_stopping = LiuTalwar.covering(candidates)
        assert random_stopping.expected_runs == method.mean
        assert true_delta(method.repetitions, mu, random_stopping.epsilon([run] * candidates, 1e-5)) <= 1e-5


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=25, deadline=None)
@given(
    epsilon=st.floats(0.05, 50), exponent=st.floats(3, 10), candidates=st.integers(1, 300), steps=st.integers(1, 10**5)
)
def test_the_single_run_is_on_the_safe_side(
    name: str, epsilon: float, exponent: float, candidates: int, steps: int
) -> None:
    delta = 10**-exponent
    tuned = single_run(name, epsilon, delta, candidates, 1.0, steps)
    again = total(name, tuned.noise_multiplier, delta, candidates, 1.0, steps)
    assert again == tuned.spent
    assert 0.99 * epsilon <= again <= epsilon
    assert tuned.run_epsilon <= epsilon
    assert tuned.run_delta <= delta
    if candidates > 1:
        assert tuned.noise_multiplier > accounting.noise_multiplier(epsilon, delta, 1.0, steps)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=15, deadline=None)
@given(epsilon=st.floats(0.1, 20), candidates=st.integers(1, 100), factor=st.integers(2, 4))
def test_more_candidates_cost_more_and_more_budget_buys_less_noise(
    name: str, epsilon: float, candidates: int, factor: int
) -> None:
    noise = single_run(name, epsilon, 1e-6, candidates, 1.0, 100).noise_multiplier
    assert single_run(name, epsilon, 1e-6, candidates * factor, 1.0, 100).noise_multiplier > noise
    assert single_run(name, epsilon * factor, 1e-6, candidates, 1.0, 100).noise_multiplier < noise
    assert single_run(name, epsilon, 1e-9, candidates, 1.0, 100).noise_multiplier > noise


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("rate", "steps", "epsilon"), [(0.05, 400, 0.5), (0.05, 400, 10.0), (0.001, 5000, 3.0)])
def test_sampled_batches_too(name: str, rate: float, steps: int, epsilon: float) -> None:
    tuned = single_run(name, epsilon, 1e-5, 8, rate, steps)
    assert 0.99 * epsilon <= total(name, tuned.noise_multiplier, 1e-5, 8, rate, steps) <= epsilon


MIXED = [
    RunShape.of(0.05, 400),
    RunShape.of(0.05, 800),
    RunShape.of(0.1, 200),
    RunShape.of(0.05, 4, [(1, 2), (0.5, 2)]),
]


@pytest.mark.parametrize("name", METHODS)
def test_candidates_of_different_length_and_batch_size(name: str) -> None:
    tuned = price(name, 3.0, 1e-5, MIXED)
    runs = [shape.run(z) for shape, z in zip(MIXED, tuned.noise_multipliers, strict=True)]
    assert 0.99 * 3.0 <= tuned.method.epsilon(runs, 1e-5) == tuned.spent <= 3.0
    assert len(set(tuned.noise_multipliers)) == len(MIXED)
    for run in runs:
        if name != "grid":  # the worst candidate decides: no grid of one kind costs more than the mixture
            assert tuned.method.epsilon([run] * len(runs), 1e-5) <= tuned.spent * (1 + 1e-9)
        assert accounting.ACCOUNTANTS["pld"].epsilon(run, tuned.run_delta) <= tuned.run_epsilon


def test_different_runs_cost_at_least_the_worst_at_every_order() -> None:
    """One candidate is much noisier than the other: the price is the bad one's alone."""
    method = PapernotSteinke.covering(2)
    bad, good = RunShape.of(0.1, 100).run(1.0), RunShape.of(0.1, 100).run(8.0)
    alone = method.epsilon([bad, bad], 1e-5)
    assert alone <= method.epsilon([good, bad], 1e-5) <= 1.01 * alone


def test_auto_takes_the_least_noise_and_gives_all_figures() -> None:
    for candidates, expected in ((2, "grid"), (30, "papernot-steinke")):
        tuned = single_run("auto", 3.0, 1e-5, candidates, 0.05, 400)
        every = prices(3.0, 1e-5, [RunShape.of(0.05, 400)] * candidates)
        assert tuned.method.name == expected
        assert tuned.noise_multiplier == min(one.noise_multiplier for one in every)
        for one in every:
            assert f"{one.method.name}: noise {one.noise_multiplier:.4g}" in tuned.explanation
            assert f"{one.coverage:.0%}" in tuned.explanation


def test_methods_are_compared_at_the_same_coverage() -> None:
    for coverage in (None, 0.5, 0.9, 0.99):
        stopping, repeating, _ = (method_named(name, 12, coverage) for name in METHODS)
        assert stopping.coverage == pytest.approx(repeating.coverage, rel=1e-9)
        assert stopping.coverage == pytest.approx(coverage or 1 - 11 / 35, rel=1e-9)
    for shape in SHAPES:
        assert PapernotSteinke.covering(12, 0.75, shape).coverage == pytest.approx(0.75, rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.0, 1.5, 4.0, 30.0])
def test_repetitions_have_the_stated_law(shape: float, mean: float) -> None:
    """Probabilities add up and have the mean; 8,000 draws fit them. Chi-square at 1e-4: fails once in 500 suites."""
    repetitions = Repetitions(mean, shape)
    first = 0 if shape == math.inf else 1
    chances = np.array(list(itertools.takewhile(lambda p: p > 1e-18, repetitions.probabilities())))
    assert chances.sum() == pytest.approx(1, abs=1e-9)
    assert chances @ np.arange(first, first + len(chances)) == pytest.approx(mean, rel=1e-5)
    assert repetitions.missing(0.3) == pytest.approx(float(chances @ 0.7 ** np.arange(first, first + len(chances))))
    rng = random.Random(f"{shape} {mean}")
    draws = np.array([repetitions.draw(rng) for _ in range(8_000)])
    assert chi_square(draws - first, chances) > 1e-4


def chi_square(draws: np.ndarray, chances: np.ndarray) -> float:
    """The p-value of the draws of 0, 1, 2, ..., with rare ones counted together."""
    expected = chances * len(draws)
    few = int(np.argmax(expected[::-1].cumsum()[::-1] < 20)) or len(expected)
    bins = max(1, min(few, int(np.count_nonzero(expected[:few] >= 5))))
    observed = np.bincount(np.minimum(draws, bins), minlength=bins + 1)[: bins + 1]
    wanted = np.append(expected[:bins], len(draws) - expected[:bins].sum())
    if wanted[-1] < 1e-6:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue) if len(wanted) > 1 else 1.0


def test_random_stopping_draws_a_geometric_number_of_uniform_candidates() -> None:
    """Chi-square at 1e-4 each, fixed seed."""
    method, rng = LiuTalwar.covering(4), random.Random(0)
    drawn = [method.draw(rng) for _ in range(20_000)]
    lengths = np.array([len(candidates) for candidates in drawn])
    assert chi_square(lengths - 1, stats.geom.pmf(np.arange(1, 500), 1 / 8)) > 1e-4
    assert stats.chisquare(np.bincount(np.concatenate(drawn), minlength=4)).pvalue > 1e-4
    assert lengths.max() <= method.most_runs
    short = LiuTalwar(4, stop_probability=0.01, delta2=0.9)
    assert max(len(short.draw(rng)) for _ in range(200)) == short.most_runs == 11


def test_a_grid_draws_every_candidate_once() -> None:
    assert GridSearch(5).draw(random.Random(0)) == (0, 1, 2, 3, 4)


METHOD_EXAMPLES = [
    GridSearch(3),
    LiuTalwar(3, 0.2, 1e-15),
    PapernotSteinke(3, 7.5, 0.5),
    PapernotSteinke(3, 7.5, math.inf),
]


@pytest.mark.parametrize("method", METHOD_EXAMPLES, ids=repr)
def test_an_event_survives_the_ledger(method: selection.SelectionMethod) -> None:
    with_statistic = ((StepEvent(0.1, 3.0, (4.0,)), 100),)
    event = SelectionEvent.of(method, [RunShape.of(0.1, 100).run(3.0), with_statistic, with_statistic])
    ledger = Ledger()
    ledger.record(event)
    again = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    assert again == ledger
    assert again.events == ((event, 1),)
    spent = again.spent(1e-5)
    assert spent.epsilon == event.epsilon(1e-5, "pld")
    assert spent.epsilon > SelectionEvent.of(method, [RunShape.of(0.1, 100).run(3.0)] * 3).epsilon(1e-5, "pld")


@pytest.mark.parametrize("method", METHOD_EXAMPLES, ids=repr)
def test_the_approximation_is_refused(method: selection.SelectionMethod) -> None:
    run = RunShape.of(0.1, 100).run(3.0)
    for ask in (
        lambda: method.epsilon([run] * 3, 1e-5, "gdp"),
        lambda: method.run_budget(run, 1e-5, "gdp"),
        lambda: SelectionEvent.of(method, [run] * 3).epsilon(1e-5, "gdp"),
        lambda: price(method, 3.0, 1e-5, [RunShape.of(0.1, 100)] * 3, "gdp"),
    ):
        with pytest.raises(InvalidArgument, match="take 'pld' or 'rdp'"):
            ask()


def test_no_noise_no_privacy() -> None:
    for name in METHODS:
        method = method_named(name, 2)
        naked, noised = RunShape.of(0.1, 10).run(0.0), RunShape.of(0.1, 10).run(5.0)
        assert method.epsilon([naked, noised], 1e-5) == math.inf
        silent = RunShape.of(0.1, 10).run(math.inf)
        assert method.epsilon([silent, silent], 1e-5) < 0.01


def test_a_delta_that_leaves_nothing_to_the_runs() -> None:
    method = LiuTalwar.covering(5)
    assert method.epsilon([full_batch(5.0)] * 5, 1e-21) == math.inf
    with pytest.raises(InvalidArgument, match="no amount of noise"):
        price(method, 1.0, 1e-21, [FULL_BATCH] * 5)
    with pytest.raises(InvalidArgument, match="no amount of noise"):
        single_run("papernot-steinke", 1e-5, 1e-5, 50, 1.0, 10)
    possible = prices(1e-5, 1e-5, [FULL_BATCH] * 5)
    assert [one.method.name for one in possible] == ["liu-talwar", "grid"]
    assert single_run("auto", 1e-5, 1e-5, 5, 1.0, 50).method.name == "grid"


GOOD = SelectionEvent.of(LiuTalwar(2, 0.25), [full_batch(5.0)] * 2).to_dict()


@pytest.mark.parametrize(
    "damage",
    [
        {"method": "liu"},
        {"method": "grid"},
        {"parameters": []},
        {"parameters": {"candidates": 2, "stop_probability": 0.25}},
        {"parameters": {"candidates": 2, "stop_probability": 1.5, "delta2": 1e-20}},
        {"parameters": {"candidates": 2, "stop_probability": 0.25, "delta2": 0}},
        {"parameters": {"candidates": 3, "stop_probability": 0.25, "delta2": 1e-20}},
        {"runs": {}},
        {"runs": []},
        {"runs": [{"candidates": 2}]},
        {"runs": [{"candidates": 2, "steps": 4}]},
        {"runs": [{"candidates": -2, "steps": []}]},
        {"runs": [{"candidates": 2, "steps": [{"event": 1, "count": 1}]}]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_damaged_event_is_refused(damage: dict[str, object]) -> None:
    assert SelectionEvent.from_dict(GOOD).to_dict() == GOOD
    with pytest.raises((InvalidArgument, InvalidType)):
        SelectionEvent.from_dict(GOOD | damage)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: single_run("lui-talwar", 3, 1e-5, 4, 0.1, 10), "did you mean 'liu-talwar'"),
        (lambda: single_run("grid", 3, 1e-5, 0, 0.1, 10), "candidates must be at least 1"),
        (lambda: single_run("grid", 0, 1e-5, 4, 0.1, 10), "epsilon"),
        (lambda: price(GridSearch(3), 3, 1e-5, [FULL_BATCH]), "made for 3 candidates, the grid has 1"),
        (lambda: price("grid", 3, 1e-5, []), "candidates must be at least 1"),
        (lambda: LiuTalwar.covering(4, 1.5), "coverage"),
        (lambda: Repetitions(0.5), "mean number of runs"),
        (lambda: Repetitions(5, -1), "shape"),
        (lambda: PapernotSteinke.covering(10**6, shape=0), "needs more than"),
        (lambda: GridSearch(2).epsilon([full_batch(1.0)], 1e-5), "has 2 runs, got 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(call: object, message: str) -> None:
    with pytest.raises(CliplessError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LiuTalwar(3, 0.0), "without a chance to stop"),
        (lambda: LiuTalwar(3, -0.1), "stop_probability must lie in"),
        (lambda: LiuTalwar(3, 1.5), "1 / \\(2 \\* candidates\\) is usual, here 0.166"),
        (lambda: LiuTalwar(3, 5e-324), "stop_probability must lie in"),
        (lambda: LiuTalwar(3, math.nan), "NaN"),
        (lambda: LiuTalwar(3, 0.1, delta2=0.0), "delta2 must lie in"),
        (lambda: LiuTalwar(3, 0.1, delta2=1.0), "delta2 must lie in"),
        (lambda: LiuTalwar(3, 0.1).total(-0.1, 1e-9), "no promise of a run"),
        (lambda: LiuTalwar(3, 0.1).total(math.nan, 1e-9), "NaN"),
        (lambda: LiuTalwar(3, 0.1).total(0.1, -1e-9), "no promise of a run"),
        (lambda: LiuTalwar(3, 0.1).total(0.1, 0.6), "between 0 and 1/2"),
        (lambda: LiuTalwar(3, 0.1).total(0.1, 0.4), "promises nothing: choose at most"),
        (lambda: LiuTalwar(3, 0.1).epsilon([full_batch(60.0)] * 2, 1e-5), "each needs a run"),
        (lambda: LiuTalwar(3, 0.1).epsilon([], 1e-5), "each needs a run"),
    ],
)
def test_random_stopping_checks_what_its_theorem_needs(call: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call()  # type: ignore[operator]


def test_random_stopping_promises_nothing_where_its_own_delta_exceeds_the_total() -> None:
    method = LiuTalwar(3, 0.1, delta2=1e-5)
    assert method.epsilon([full_batch(60.0)] * 3, 1e-5) == math.inf
    assert method.epsilon([full_batch(60.0)] * 3, 2e-5) < math.inf
