"""The parts of the accountants against dp-accounting, extended precision and brute force."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.rdp.rdp_privacy_accountant import _compute_rdp_poisson_subsampled_gaussian, compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import fft, signal

from clipless.accounting import StepEvent, composition, losses, pld
from clipless.accounting.conversion import renyi_epsilon
from clipless.accounting.ledger import Ledger
from clipless.accounting.moments import divergence
from clipless.accounting.release import Release, coarser

RATES = [1e-6, 1e-3, 0.1, 0.5, 0.999, 1.0]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("noise", [0.05, 0.2, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("removing", [True, False])
def test_deltas_of_one_step_are_those_of_dp_accounting(rate, noise, removing):
    adjacency = AdjacencyType.REMOVE if removing else AdjacencyType.ADD
    mechanism = GaussianPrivacyLoss(noise, sampling_prob=rate, adjacency_type=adjacency)
    low, high = losses.loss_range(rate, noise, removing, 1e-6, 1e-12)
    epsilons = np.linspace(low - 0.1 * abs(low), min(high, 600.0), 301)
    with np.errstate(all="ignore"):
        expected = mechanism.get_delta_for_epsilon(epsilons)
    found = losses.deltas(rate, noise, removing, epsilons)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-15 * max(1.0, abs(high)))
    assert (np.diff(found) <= 0).all()


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("noise", [0.05, 0.5, 1.0, 4.0, 100.0, 1e4])
@pytest.mark.parametrize("order", [1.1, 1.5, 1.75, 2, 2.5, 9.7, 15.3, 16, 64, 777])
def test_divergences_are_those_of_dp_accounting(rate, noise, order, caplog):
    with np.errstate(all="ignore"):
        expected = float(_compute_rdp_poisson_subsampled_gaussian(rate, noise, [order])[0])
    assert divergence(rate, noise, order) == pytest.approx(expected, rel=1e-11, abs=1e-12)


def parts(releases, delta, removing):
    ranges = [pld._loss_range(release, delta, removing) for release in releases]
    interval, _ = pld._interval(releases, ranges, 20_000)
    pairs = zip(releases, ranges, strict=True)
    return [pld._part(r, low, high, interval, removing, delta) for r, (low, high) in pairs]


def in_extended_precision(some, total):
    """The same sum by plain powers of transforms in long doubles, on a window that nothing leaves unseen."""
    size = fft.next_fast_len(len(total.masses), real=True)
    product = np.ones(size // 2 + 1, dtype=np.clongdouble)
    for low, masses, _, repeats in some:
        rest = np.zeros(size, dtype=np.longdouble)
        np.add.at(rest, np.arange(len(masses)) % size, masses)
        turns = np.longdouble(low * repeats % size) * np.arange(size // 2 + 1)
        turn = np.exp(-2j * np.longdouble(np.pi) * (turns % size) / size)
        product *= np.exp(np.longdouble(repeats) * np.log(fft.rfft(rest))) * turn
    return np.roll(fft.irfft(product, size), -(total.low % size))[: len(total.masses)]


@pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="no longer floats here")
@pytest.mark.parametrize("removing", [True, False])
@pytest.mark.parametrize(
    ("releases", "delta"),
    [
        ((Release(1e-6, 0.7, 10**6),), 1e-8),
        ((Release(1e-3, 0.8, 10**5),), 1e-8),
        ((Release(0.5, 30.0, 10**4),), 1e-6),
        ((Release(0.1, 20.0, 10**6),), 1e-7),
        ((Release(0.9, 2.0, 3),), 1e-8),
        (tuple(Release(1e-3, 0.8 * 1.02**k, 3000) for k in range(16)), 1e-8),
    ],
)
def test_rounding_misplaces_less_than_is_charged(releases, delta, removing):
    some = parts(releases, delta, removing)
    total = composition.composed(some, 1e-3 * delta)
    exact = in_extended_precision(some, total)
    tails = np.abs(np.cumsum((total.masses - exact)[::-1])).max()
    assert tails < composition.misplaced(some, extended=False) / 2


def test_a_window_loses_no_more_than_the_tail():
    """Against plain convolution, of losses that are mostly nothing and rarely large."""
    rare = composition.RepeatedLoss(-1, np.array([0.09, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.01]), 1e-9, 40)
    even = composition.RepeatedLoss(3, np.full(5, 0.2), 0.0, 25)
    total = composition.composed([rare, even], 1e-6)
    plain = np.ones(1)
    for part in (rare, even):
        for _ in range(part.repeats):
            plain = signal.convolve(plain, part.masses, method="direct")
    first = total.low - (40 * -1 + 25 * 3)
    inside = plain[first : first + len(total.masses)]
    assert len(inside) == len(total.masses) < len(plain)
    assert plain.sum() - inside.sum() < 1e-6
    assert (total.masses >= inside - 1e-15).all()
    assert total.infinity == pytest.approx(1e-6 + 40e-9, rel=1e-6)


@pytest.mark.parametrize("removing", [True, False])
def test_full_batches_of_different_noise_have_a_closed_form(removing):
    releases = tuple(Release(1.0, 20.0 * 1.1**k, 50 + k) for k in range(12))
    mu = math.sqrt(sum(n / z**2 for _, z, n, *_ in releases))
    exact = dp_accounting.get_epsilon_gaussian(1 / mu, 1e-7)
    bound, _ = pld._direction(releases, 1e-7, removing=removing, points=pld.MAX_POINTS)
    assert exact <= bound <= 1.005 * exact


def binary_divergence(p, q, order):
    terms = [order * math.log(p) + (1 - order) * math.log(q), order * math.log1p(-p) + (1 - order) * math.log1p(-q)]
    return float(np.logaddexp(*terms)) / (order - 1)


shares = st.floats(1e-9, 1 - 1e-9)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(shares, shares, st.floats(1.05, 40.0), st.floats(1e-10, 0.3))
def test_the_conversion_holds_for_every_pair_of_coins(p, q, order, delta):
    """Coins are the worst case: what holds for them holds for all pairs of distributions."""
    spent = renyi_epsilon(order, max(binary_divergence(p, q, order), 0.0), delta)
    assert p - math.exp(min(spent, 700.0)) * q <= delta * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("order", [1.5, 2.0, 4.0, 16.0])
@pytest.mark.parametrize("amount", [1e-3, 0.05, 1.0])
@pytest.mark.parametrize("delta", [1e-6, 1e-2])
def test_the_conversion_loses_nothing(order, amount, delta):
    """Some pair of coins of that divergence needs nearly as much."""
    spent = renyi_epsilon(order, amount, delta)
    assert spent <= compute_epsilon([order], [amount], delta)[0]
    needed = 0.0
    for p in np.concatenate([np.geomspace(1.01 * delta, 0.5, 400), 1 - np.geomspace(1e-6, 0.5, 400)]):
        low, high = -700.0, math.log(p)
        for _ in range(60):
            middle = (low + high) / 2
            too_far = binary_divergence(p, math.exp(middle), order) > amount
            low, high = (middle, high) if too_far else (low, middle)
        needed = max(needed, math.log(p - delta) - high)
    assert needed <= spent <= 1.01 * needed + 1e-4


@given(
    st.lists(st.tuples(st.floats(1e-5, 1.0), st.floats(1e-3, 1e3), st.integers(1, 9)), min_size=1, max_size=150),
    st.integers(4, 40),
)
def test_merged_releases_are_few_and_each_at_least_as_costly(steps, limit):
    exact = tuple(sorted({(q, z): Release(q, z, n) for q, z, n in steps}.values()))
    merged = coarser(exact, limit)
    assert len(merged) <= limit
    assert sum(r.steps for r in merged) == sum(r.steps for r in exact)
    for release in exact:
        assert any(
            m.sample_rate >= release.sample_rate and m.noise_multiplier <= release.noise_multiplier for m in merged
        )


def test_a_long_history_of_changing_noise_is_close_and_grows():
    ledger, spent = Ledger(), []
    for step in range(3000):
        ledger.record(StepEvent(0.01, 2.0 * 0.5 ** (step / 3000)))
        if step % 500 == 499:
            spent.append(ledger.spent(1e-5, "rdp").epsilon)
    assert spent == sorted(spent)
    releases = [Release(0.01, 2.0 * 0.5 ** (step / 3000), 1) for step in range(3000)]
    orders = [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 24.0, 28.0]
    exact = min(
        renyi_epsilon(a, sum(divergence(r.sample_rate, r.noise_multiplier, a) for r in releases), 1e-5) for a in orders
    )
    assert 0.995 * exact <= spent[-1] <= 1.03 * exact
