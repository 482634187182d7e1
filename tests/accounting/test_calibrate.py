import math

import pytest
import sweep
from hypothesis import given, settings
from hypothesis import strategies as st

import children
from clipless.accounting import ACCOUNTANTS, epsilon, noise_multiplier, scheduled_epsilon, scheduled_multiplier
from clipless.accounting.calibrate import LEAST_MULTIPLIER, MOST_MULTIPLIER, SAME, OutOfReach, search
from clipless.errors import InvalidArgument, InvalidType

# epsilon, delta, sample_rate, steps
CORNERS = [
    (3.0, 1e-5, 0.01, 1000),
    (0.01, 1e-5, 0.01, 1000),
    (200.0, 1e-5, 0.01, 1000),
    (1.0, 1e-6, 0.3, 50),
    (0.01, 1e-12, 1e-6, 1),
    (0.01, 1e-12, 1.0, 1_000_000),
    (0.01, 1e-5, 1e-6, 1_000_000),
    (0.1, 1e-5, 0.1, 1_000_000),
    (1.0, 1e-12, 1e-6, 1_000_000),
    (3.0, 1e-9, 1e-4, 1_000_000),
    (200.0, 1e-12, 1e-6, 1),
    (200.0, 1e-12, 1.0, 1),
    (200.0, 1e-2, 0.5, 1_000_000),
    (200.0, 1e-5, 0.999, 100),
    (10.0, 1e-2, 0.01, 10_000),
]


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_calibration_is_safe_and_close(name, corner):
    target, delta, rate, steps = corner
    z = noise_multiplier(target, delta, rate, steps, name)
    assert math.isfinite(z)
    assert z > LEAST_MULTIPLIER
    assert 0.99 * target <= epsilon(z, rate, steps, delta, name) <= target


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_a_larger_budget_needs_less_noise(name):
    noises = [noise_multiplier(target, 1e-5, 0.02, 500, name) for target in (0.1, 0.5, 2.0, 8.0, 30.0)]
    assert noises == sorted(noises, reverse=True)
    assert len(set(noises)) == len(noises)


def test_rdp_does_not_jump_to_zero():
    """dp-accounting says 0 as soon as a divergence falls below delta ** 2, and 40 just above; the truth lies between."""
    noises = [noise_multiplier(target, 0.01, 1e-6, 1, "rdp") for target in (0.01, 0.1, 1.0, 10.0)]
    assert noises == sorted(noises, reverse=True)
    assert len(set(noises)) == 4


def kept(rows):
    return [(found, problem) for _, found, problem in rows if found not in ("", "floor")]


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_some_of_the_sweep(name):
    """`make sweep` tries all, and measures seconds and megabytes."""
    rows = sweep.constant(name, every=45)
    assert len(rows) == 20
    assert not kept(rows)
    assert any(found == "floor" for _, found, _ in rows) == (name == "pld")


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_some_plans_of_every_policy(name):
    """What the steps write into the ledger, the statistic's cost inside, spends the target and not more."""
    rows = sweep.planned(name, every=25)
    assert len(rows) == 3 * len(sweep.policies())
    assert not kept(rows)


def logarithmic(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
@settings(max_examples=12, deadline=None, derandomize=True)
@given(logarithmic(0.01, 200), logarithmic(1e-12, 1e-2), logarithmic(1e-6, 1), logarithmic(1, 1e6).map(round))
def test_anywhere_calibration_is_safe_and_close(name, target, delta, rate, steps):
    z = noise_multiplier(target, delta, rate, steps, name)
    spent = epsilon(z, rate, steps, delta, name)
    sampled = sweep.chance_of_being_sampled(rate, steps)
    assert sweep.verdict(target, spent, z, LEAST_MULTIPLIER, sampled, delta) in ("", "floor")
    if sampled < 0.99 * delta:
        assert (z == LEAST_MULTIPLIER) == (name == "pld")


stairs = st.lists(st.tuples(logarithmic(0.1, 1), st.integers(1, 3000)), min_size=2, max_size=6)


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
@settings(max_examples=12, deadline=None, derandomize=True)
@given(logarithmic(0.01, 200), logarithmic(1e-10, 1e-5), logarithmic(1e-4, 1), stairs)
def test_noise_that_varies_by_any_schedule_is_calibrated(name, target, delta, rate, schedule):
    z = scheduled_multiplier(target, delta, rate, schedule, name)
    assert 0.99 * target <= scheduled_epsilon(z, rate, schedule, delta, name) <= target


def test_a_delta_above_the_chance_of_being_sampled_needs_next_to_no_noise():
    assert noise_multiplier(1.0, 1e-3, 1e-6, 10) == LEAST_MULTIPLIER
    assert epsilon(LEAST_MULTIPLIER, 1e-6, 10, 1e-3) <= 1.0


@pytest.mark.parametrize("jump", [0.01, 0.7, 2.0, 500.0])
@pytest.mark.parametrize("start", [1e-3, 1.0, 1e5])
@pytest.mark.parametrize(("before", "after"), [(5.0, 1.0), (math.inf, 0.0), (3.0 + 1e-9, 2.0), (math.nan, 1.0)])
def test_at_a_jump_the_safe_side_is_returned(jump, start, before, after):
    z = search(lambda z: before if z < jump else after, target=3.0, start=start)
    assert jump <= z <= jump * SAME


@pytest.mark.parametrize("least", [3.1, math.inf, math.nan])
def test_what_no_noise_can_reach_is_refused_soon(least):
    tried = []

    def spent(z):
        tried.append(z)
        return least * (1 + 1 / z)

    with pytest.raises(OutOfReach, match="larger epsilon"):
        search(spent, target=3.0, start=1.0)
    assert MOST_MULTIPLIER <= tried[-1] < math.inf
    assert len(tried) < 50


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
@pytest.mark.parametrize("problem", [(1e-3, 1e-5, 0.01, 10**9), (1e-3, 1e-5, 0.5, 10**12)])
def test_very_long_runs_are_calibrated(name, problem):
    """Rounding, which is charged for every step, exceeds the target here; full batches bound what a step costs."""
    target, delta, rate, steps = problem
    z = noise_multiplier(*problem, name)
    assert 0.99 * target <= epsilon(z, rate, steps, delta, name) <= target


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
@pytest.mark.parametrize(
    "change",
    [{"epsilon": 10**400}, {"epsilon": 1e-310}, {"delta": 1e-310}, {"sample_rate": 1e-310}, {"steps": 10**400}],
    ids=lambda change: next(iter(change)),
)
def test_numbers_beyond_floats_are_refused(name, change):
    arguments = {"epsilon": 1.0, "delta": 1e-5, "sample_rate": 0.1, "steps": 10} | change
    with pytest.raises(InvalidArgument, match=next(iter(change))):
        noise_multiplier(**arguments, accountant=name)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"epsilon": 0.0}, InvalidArgument),
        ({"epsilon": -1.0}, InvalidArgument),
        ({"epsilon": math.inf}, InvalidArgument),
        ({"epsilon": math.nan}, InvalidArgument),
        ({"epsilon": "3"}, InvalidType),
        ({"delta": 0.0}, InvalidArgument),
        ({"delta": 1.0}, InvalidArgument),
        ({"sample_rate": 0.0}, InvalidArgument),
        ({"sample_rate": 2.0}, InvalidArgument),
        ({"steps": 0}, InvalidArgument),
        ({"steps": 1.0}, InvalidType),
        ({"accountant": "RDP"}, InvalidArgument),
    ],
)
def test_bad_arguments_are_refused(change, error):
    arguments = {"epsilon": 1.0, "delta": 1e-5, "sample_rate": 0.1, "steps": 10} | change
    with pytest.raises(error):
        noise_multiplier(**arguments)


@pytest.mark.parametrize("corner", [(0.1, 1e-5, 0.1, 1_000_000)])
def test_memory_stays_small(corner):
    script = (
        "import resource; from clipless.accounting import noise_multiplier\n"
        "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"before = used(); noise_multiplier(*{corner}); print((used() - before) // 1024)"
    )
    run = children.run_code(script)
    assert int(run.stdout) < 500
    assert not run.stderr
