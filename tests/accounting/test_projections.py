"""Steps whose norms are estimated by random projections: against integrals, simulation and the exact engine's epsilon."""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import integrate, optimize, stats

import clipless
from clipless.accounting import ACCOUNTANTS, Ledger, StepEvent
from clipless.accounting.losses import deltas as exact_deltas
from clipless.accounting.projections import deltas, exceeds, multipliers, quantile, shares
from clipless.accounting.release import Release, coarser, releases
from clipless.errors import InvalidArgument

SETTINGS = [(0.01, 1.0, 1000, 1e-5), (0.05, 2.0, 200, 1e-6), (1.0, 20.0, 50, 1e-5), (0.2, 0.7, 10, 1e-3)]


def spent(rate: float, z: float, steps: int, delta: float, r: int, statistics: tuple[float, ...] = ()) -> float:
    return ACCOUNTANTS["pld"].epsilon([(StepEvent(rate, z, statistics, r), steps)], delta)


@pytest.mark.parametrize(("rate", "z", "steps", "delta"), SETTINGS)
def test_epsilon_falls_with_the_projections_towards_the_exact_one_and_stays_above(
    rate: float, z: float, steps: int, delta: float
) -> None:
    exact = clipless.epsilon(z, rate, steps, delta)
    found = [spent(rate, z, steps, delta, r) for r in (1, 5, 20, 100, 10_000)]
    assert all(math.isfinite(epsilon) for epsilon in found)
    assert all(more > fewer for more, fewer in pairwise(found))
    assert min(found) >= exact
    assert found[-1] < 1.02 * exact


@pytest.mark.parametrize("r", [5, 100])
def test_calibration_is_on_the_safe_side(r: int) -> None:
    z = clipless.noise_multiplier(3.0, 1e-5, 0.05, 300, projections=r)
    assert 2.9 < clipless.epsilon(z, 0.05, 300, 1e-5, projections=r) <= 3.0
    assert z > clipless.noise_multiplier(3.0, 1e-5, 0.05, 300)
    with pytest.raises(InvalidArgument, match="rdp cannot account"):
        clipless.noise_multiplier(3.0, 1e-5, 0.05, 300, "rdp", projections=r)


@pytest.mark.parametrize("statistic", [math.inf, 3.0])
@pytest.mark.parametrize("removing", [True, False])
def test_a_composed_value_is_that_of_a_simulation(removing: bool, statistic: float) -> None:
    """delta(epsilon) = E[(1 - e^(epsilon - loss))+] over 400,000 simulated runs, at the epsilon claimed for delta. The
    worse direction must use the delta up, the other must stay below. False alarm: 5 standard errors."""
    rate, z, steps, r, delta = 0.3, 1.5, 12, 20, 2e-3
    epsilon = spent(rate, z, steps, delta, r, () if statistic == math.inf else (statistic,))
    generator = np.random.default_rng(7)
    runs, loss = 400_000, np.zeros(400_000)
    for _ in range(steps):
        shift = np.sqrt(r / generator.chisquare(r, runs) / z**2 + statistic**-2.0)
        present = generator.random(runs) < rate if removing else np.zeros(runs, dtype=bool)
        x = generator.standard_normal(runs) + np.where(present, shift, 0.0)
        ratio = np.log1p(rate * np.expm1(x * shift - shift**2 / 2))
        loss += ratio if removing else -ratio
    terms = np.maximum(0.0, -np.expm1(epsilon - loss))
    estimate, error = float(terms.mean()), float(terms.std() / math.sqrt(runs))
    assert estimate <= delta + 5 * error
    if removing:
        assert estimate >= 0.9 * delta - 5 * error


@pytest.mark.parametrize("r", [3, 20])
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_one_step_is_the_mean_over_the_random_sensitivity(rate: float, r: int) -> None:
    z, delta = 1.2, 1e-4

    def mean_delta(epsilon: float) -> float:
        def at(chi: float) -> float:
            noise = z / math.sqrt(r / chi)
            values = [float(exact_deltas(rate, noise, removing, np.array([epsilon]))[0]) for removing in (True, False)]
            return max(values) * float(stats.chi2.pdf(chi, r))

        pieces = [0, 0.01, 0.1, 0.5, 1, 3, 10, 30, 100, 400]
        return sum(integrate.quad(at, a, b, limit=200, epsabs=1e-11)[0] for a, b in pairwise(pieces))

    truth = optimize.brentq(lambda epsilon: mean_delta(epsilon) - delta, 0.01, 1e3, xtol=1e-6)
    claimed = spent(rate, z, 1, delta, r)
    assert truth <= claimed <= 1.06 * truth


@pytest.mark.parametrize("removing", [True, False])
@pytest.mark.parametrize("rate", [0.2, 1.0])
def test_what_lies_beyond_the_grid_is_counted(rate: float, removing: bool) -> None:
    """With a grid that leaves out one sensitivity in ten the mean over all of them is still bounded."""
    r, z, epsilons = 2, 1.0, np.array([-1.0, 0.0, 0.1, 1.0, 3.0, 8.0, 20.0])
    found = shares(r, 0.1)
    bound = deltas(rate, found, multipliers(found.values, z, math.inf), removing, 1e-9, epsilons)
    chances = (np.arange(200_000) + 0.5) / 200_000
    noise = z / np.sqrt(r / stats.chi2.ppf(chances, r))
    truth = np.zeros(len(epsilons))
    for each in noise[::200]:
        truth += exact_deltas(rate, float(each), removing, epsilons) / len(noise[::200])
    assert (bound >= truth - 1e-3).all()
    assert (bound <= truth + 0.1 * rate + 0.05).all()
    in_clear = 0.1 * (rate if removing else max(0.0, 1 - math.exp(epsilons[3]) * (1 - rate)))
    assert bound[3] >= in_clear * 0.999
    assert bound[-1] >= (0.1 * rate * 0.999 if removing or rate == 1 else 0.0)


@pytest.mark.parametrize("r", [1, 2, 5, 20, 100, 5000])
@pytest.mark.parametrize("beyond", [1e-3, 1e-9, 1e-15])
def test_the_grid_of_sensitivities_is_rounded_up(r: int, beyond: float) -> None:
    found = shares(r, beyond)
    assert found.weights.sum() + found.beyond == pytest.approx(1.0, abs=1e-12)
    assert found.beyond == pytest.approx(beyond, rel=1e-3)
    assert found.values[-1] == pytest.approx(quantile(r, beyond))
    for share in np.geomspace(found.values[0], found.values[-1] * 0.999, 50):
        truth = float(stats.chi2.cdf(r / share**2, r))
        assert float(exceeds(r, share)) == pytest.approx(truth, rel=1e-6)
        assert found.weights[found.values > share].sum() + found.beyond >= truth * (1 - 1e-9)


@pytest.mark.parametrize("accountant", ["rdp", "gdp"])
def test_accountants_that_would_need_a_bound_refuse(accountant: str) -> None:
    ledger = Ledger()
    ledger.record(StepEvent(0.1, 1.0, (), 20), 3)
    with pytest.raises(InvalidArgument, match=f"{accountant} cannot account.*'pld'"):
        ledger.spent(1e-5, accountant)
    assert 0 < ledger.spent(1e-5).epsilon < math.inf


def test_selection_prices_by_renyi_divergences_are_infinite() -> None:
    from clipless.accounting.gdp import gdp_epsilon
    from clipless.accounting.rdp import rdp_epsilon
    from clipless.accounting.selection.papernot_steinke import divergences

    kind = (Release(0.1, 1.0, 3, 20),)
    assert rdp_epsilon(kind, 1e-5) == gdp_epsilon(kind, 1e-5) == math.inf
    assert np.isinf(divergences(kind, [2.0, 8.0])).all()


def test_events_are_written_and_read() -> None:
    event = StepEvent(0.1, 1.0, (3.0,), 20)
    assert StepEvent.from_dict(event.to_dict()) == event
    assert "projections" not in StepEvent(0.1, 1.0).to_dict()
    assert StepEvent.from_dict(StepEvent(0.1, 1.0).to_dict()).projections is None
    for wrong in (0, -1, 2.5, True):
        with pytest.raises((InvalidArgument, TypeError)):
            StepEvent(0.1, 1.0, (), wrong)  # type: ignore[arg-type]


def test_different_steps_are_kept_apart_and_compose() -> None:
    mixture = [(StepEvent(0.1, 2.0, (), 20), 20), (StepEvent(0.1, 2.0), 20), (StepEvent(0.1, 2.0, (5.0,), 20), 20)]
    assert len(releases(mixture)) == 3
    epsilon = ACCOUNTANTS["pld"].epsilon(mixture, 1e-5)
    assert clipless.epsilon(2.0, 0.1, 60, 1e-5) < epsilon < spent(0.1, 1.8, 60, 1e-5, 20)


def test_many_different_steps_are_rounded_to_costlier_ones_of_their_own_kind() -> None:
    many = tuple(Release(0.1, 1.0 + k / 100, 1, r) for k in range(100) for r in (0, 20))
    few = coarser(many, 16)
    assert len(few) <= 16
    for r in (0, 20):
        assert sum(one.steps for one in few if one.projections == r) == 100
        assert min(one.noise_multiplier for one in few if one.projections == r) == 1.0
