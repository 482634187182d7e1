"""The bounds for one person, against the definition of (ε, δ)-differential privacy."""

import math

import numpy as np
import pytest

from clipless.app.report_page.promise import advantage, most_probable, odds_factor, right_guesses
from clipless.app.report_page.values import percent_up

BUDGETS = [(0.0, 0.0), (0.1, 1e-5), (1.0, 0.01), (3.0, 3.4e-4), (3.0, 0.0), (8.0, 1e-6), (0.0, 0.3)]


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_the_advantage_is_the_best_that_the_definition_allows(epsilon: float, delta: float) -> None:
    """For each false-positive rate the largest true-positive rate that both inequalities allow; the best is the bound."""
    fpr = np.linspace(0, 1, 200_001)
    tpr = np.minimum(np.exp(epsilon) * fpr + delta, 1 - np.exp(-epsilon) * (1 - fpr - delta))
    best = (np.clip(tpr, 0, 1) - fpr).max()
    assert advantage(epsilon, delta) == pytest.approx(best, abs=1e-4)
    assert advantage(epsilon, delta) >= best - 1e-12
    assert right_guesses(epsilon, delta) == pytest.approx((math.exp(epsilon) + delta) / (1 + math.exp(epsilon)))


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_randomised_response_reaches_the_bounds(epsilon: float, delta: float) -> None:
    """The mechanism that shows the record with probability δ, and else answers truthfully with odds e^ε."""
    truthful = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert right_guesses(epsilon, delta) == pytest.approx(delta + (1 - delta) * truthful)


def test_without_a_budget_nothing_is_promised() -> None:
    assert (advantage(math.inf, 0.0), right_guesses(math.inf, 1e-5), most_probable(0.01, math.inf, 0.0)) == (1, 1, 1)
    assert odds_factor(800.0) == math.inf
    assert most_probable(0.01, 1.0, 0.001) == pytest.approx(0.01 * math.e + 0.001)


@pytest.mark.parametrize("share", [0.0, 1e-9, 0.5, 0.95, 0.99, 0.99999, 1 - 1e-9, 1.0])
def test_a_bound_is_never_rounded_down_nor_shown_as_certainty(share: float) -> None:
    shown = float(percent_up(share).removesuffix(" %")) / 100
    assert shown >= share * (1 - 1e-15)
    assert (shown == 1) == (share == 1)
