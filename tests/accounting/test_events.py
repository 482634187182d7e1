import dataclasses
import math

import dp_accounting
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.dp_events import dp_event
from clipless.accounting import StepEvent, epsilon, gradient_multiplier, joint_multiplier
from clipless.accounting.accountants import accountant_named
from clipless.errors import InvalidArgument, InvalidType

ratios = st.floats(min_value=1e-6, max_value=1e6)


@given(ratios)
def test_joint_multiplier_of_one_is_exactly_that_one(z):
    assert joint_multiplier(z) == z


@given(st.lists(ratios, min_size=1, max_size=6))
def test_joint_multiplier_adds_inverse_squares(zs):
    assert joint_multiplier(*zs) == pytest.approx(sum(z**-2 for z in zs) ** -0.5, rel=1e-12)


@given(ratios, st.floats(min_value=1.001, max_value=1e6))
def test_gradient_multiplier_undoes_joint_multiplier(total, ratio):
    statistic = total * ratio
    together = joint_multiplier(gradient_multiplier(total, statistic), statistic)
    assert total <= together == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(("total", "statistic"), [(6.41, 10.96), (5.0, 41.19), (0.95, 3.2), (16.8, 50.84)])
def test_a_gradient_multiplier_is_rounded_up(total, statistic):
    """For these the rounding of the formula alone would leave it too small by its last digit."""
    assert joint_multiplier(gradient_multiplier(total, statistic), statistic) >= total


@pytest.mark.parametrize("statistic", [1.0, 1.1])
def test_a_statistic_that_takes_the_whole_step_is_refused_with_the_value_to_exceed(statistic):
    with pytest.raises(InvalidArgument, match=r"raise it above 1\.1"):
        gradient_multiplier(1.1, statistic)


@pytest.mark.parametrize("zs", [(0.0, 1.0), (0.0,), (math.inf, 0.0)])
def test_one_release_in_clear_makes_the_step_clear(zs):
    assert joint_multiplier(*zs) == 0


def test_multipliers_of_any_size_do_not_overflow():
    assert joint_multiplier(1e-200, 1e-200) == pytest.approx(1e-200 / math.sqrt(2))
    assert joint_multiplier(1e200, math.inf) == 1e200
    assert joint_multiplier(math.inf, math.inf) == math.inf


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (StepEvent(0.1, 2.0), dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0))),
        (StepEvent(0.1, 3.0, (4.0,)), dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.4))),
        (StepEvent(1.0, 2.0), dp_accounting.GaussianDpEvent(2.0)),
        (StepEvent(0.1, 0.0), dp_accounting.NonPrivateDpEvent()),
        (StepEvent(0.1, math.inf), dp_accounting.NoOpDpEvent()),
    ],
)
def test_dp_event(event, expected):
    assert dp_event(event) == expected


@given(st.floats(1e-6, 1), ratios, st.lists(ratios, max_size=3).map(tuple))
def test_dict_round_trip(rate, gradient, statistics):
    event = StepEvent(rate, gradient, statistics)
    assert StepEvent.from_dict(event.to_dict()) == event


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0.0, 1.0), InvalidArgument),
        ((1.01, 1.0), InvalidArgument),
        ((-0.1, 1.0), InvalidArgument),
        ((math.nan, 1.0), InvalidArgument),
        ((0.1, -1.0), InvalidArgument),
        ((0.1, math.nan), InvalidArgument),
        ((0.1, 1.0, (-1.0,)), InvalidArgument),
        ((0.1, 1.0, [1.0]), InvalidType),
        (("0.1", 1.0), InvalidType),
        ((True, 1.0), InvalidType),
    ],
)
def test_an_event_that_cannot_be_is_refused(arguments, error):
    with pytest.raises(error):
        StepEvent(*arguments)


def test_an_event_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StepEvent(0.1, 1.0).gradient_multiplier = 2.0


@pytest.mark.parametrize("record", [{}, {"sample_rate": 0.1}, StepEvent(0.1, 1.0).to_dict() | {"more": 1}])
def test_a_record_with_other_fields_is_refused(record):
    with pytest.raises(InvalidArgument, match="fields"):
        StepEvent.from_dict(record)


def test_a_statistic_is_charged():
    plain = StepEvent(0.01, 2.0)
    with_statistic = StepEvent(0.01, 2.0, (4.0,))
    costs = [epsilon(e.noise_multiplier, e.sample_rate, 500, 1e-5) for e in (plain, with_statistic)]
    assert costs[1] > 1.05 * costs[0]
    assert [accountant_named("pld").epsilon([(e, 500)], 1e-5) for e in (plain, with_statistic)] == costs
