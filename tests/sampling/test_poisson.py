"""The law of Poisson draws made of geometric gaps: each record, pairs, counts, at rates from 1e-7 to 1; and exact arithmetic
where floating point leaves a gap open."""

import itertools
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from clipless.noise.keys import SeededKeys, keystream, words
from clipless.sampling import poisson
from clipless.sampling.poisson import _exact_gap, _gaps, poisson_sample

# The odds that a right sampler fails one kind of comparison. Keys are fixed, so an alarm is a fault or a change of numbers.
RARE = 1e-8


def draws(size: int, rate: float, count: int) -> list[np.ndarray]:
    return [poisson_sample(SeededKeys(11).key("sample", draw), size, rate).numpy() for draw in range(count)]


def rare(counts: np.ndarray, trials: int, odds: float) -> bool:
    """Whether any of these binomial counts is one that all of them together give with odds of RARE."""
    law = stats.binom(trials, odds)
    return bool(np.minimum(law.cdf(counts), law.sf(counts - 1)).min() < RARE / 2 / counts.size)


@pytest.mark.parametrize("rate", [0.003, 0.1, 0.5, 0.9, 1 - 1e-6])
def test_each_record_each_pair_and_their_number(rate: float) -> None:
    """Exact binomial tests of 60 records, of 1,770 pairs, of neighbours among them, and of the total; the spread of the
    sizes by its variance."""
    size, count = 60, 4000
    members = np.zeros((count, size))
    for row, chosen in zip(members, draws(size, rate, count), strict=True):
        row[chosen] = 1
    together = (members.T @ members)[np.triu_indices(size, 1)]
    assert not rare(members.sum(0), count, rate)
    assert not rare(together, count, rate**2)
    assert not rare(members.sum(keepdims=True).reshape(1), size * count, rate)
    sizes, law = members.sum(1), stats.binom(size, rate)
    kurtosis = float(law.stats("k"))
    assert abs(sizes.var() / law.var() - 1) < 8 * math.sqrt((2 + max(kurtosis, 0)) / count)


def test_a_rate_of_one_in_ten_million() -> None:
    """10^8 records, 10 of them expected: sizes by chi-square against the binomial law, places by Kolmogorov-Smirnov."""
    size, rate, count = 10**8, 1e-7, 4000
    drawn = draws(size, rate, count)
    sizes, law = np.array([len(chosen) for chosen in drawn]), stats.binom(size, rate)
    edges = np.arange(4, 19)
    expected = np.diff(np.concatenate([[0], law.cdf(edges), [1]])) * count
    observed = np.histogram(sizes, np.concatenate([[-1], edges, [size]]) + 0.5)[0]
    assert stats.chisquare(observed, expected).pvalue > RARE
    places = np.concatenate(drawn)
    assert 0 <= places.min() < places.max() < size
    assert stats.kstest(places / size, "uniform").pvalue > RARE
    gaps = np.concatenate([np.diff(chosen) for chosen in drawn])
    assert stats.kstest(places % 1000 / 1000 + 0.0005, "uniform").pvalue > RARE, "the last digits"
    assert len(np.unique(gaps)) > 0.99 * len(gaps)


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_rate_of_one_takes_every_record(size: int) -> None:
    assert poisson_sample(bytes(32), size, 1.0).tolist() == list(range(size))


@given(st.integers(1, 300), st.floats(1e-9, 1), st.integers(0, 10**6))
def test_records_are_in_order_once_each_and_of_the_data_set(size: int, rate: float, draw: int) -> None:
    key = SeededKeys(1).key("sample", draw)
    chosen = poisson_sample(key, size, rate).tolist()
    assert chosen == sorted(set(chosen))
    assert all(0 <= record < size for record in chosen)
    assert poisson_sample(key, size, rate).tolist() == chosen


def test_how_many_gaps_are_drawn_at_a_time_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [chosen.tolist() for chosen in draws(5000, 0.1, 20)]
    monkeypatch.setattr(poisson, "_MOST", 2)
    assert [chosen.tolist() for chosen in draws(5000, 0.1, 20)] == whole


def test_few_numbers_are_drawn_for_a_small_batch_of_many_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """O(B): as many at 10^8 records as at 10^4."""
    asked: dict[int, int] = {}
    for size in (10**4, 10**6, 10**8):

        def counted(key: bytes, first: int, count: int, size: int = size) -> np.ndarray:
            asked[size] = asked.get(size, 0) + count
            return words(key, first, count)

        monkeypatch.setattr(poisson, "words", counted)
        draws(size, 256 / size, 20)
    assert max(asked.values()) == min(asked.values()) < 20 * 2 * 256


# The exact gap.


def slow_gap(bits: int, known: int, rate: float) -> set[int]:
    """The gaps of both ends of the interval that these bits of U leave, in 400 digits."""
    with localcontext() as context:
        context.prec = 400
        ends = (Decimal(bits + end) / Decimal(2) ** known for end in (0, 1))
        return {math.floor(end.ln() / (1 - Decimal(rate)).ln()) for end in ends if end}


@pytest.mark.parametrize("rate", [1e-12, 1e-7, 0.001, 1 / 3, 0.5, 0.75, 0.999, 1 - 2.0**-53])
def test_gaps_are_those_of_exact_arithmetic(rate: float) -> None:
    """Of a real number U of which 64 bits are known; where these do not decide, of one of 192 bits."""
    key = bytes(range(32))
    bits = words(key, 0, 1000).tolist()
    for number, gap in enumerate(_gaps(key, 0, 1000, 2**60, rate).tolist()):
        if number % 10 == 0:
            extended = bits[number] << 128 | int.from_bytes(keystream(key, (number + 1) << 64, 16))
            assert slow_gap(extended, 192, rate) == {gap}
            assert _exact_gap(key, number, bits[number], rate) == gap


@pytest.mark.parametrize("rate", [0.5, 0.75, 0.1, 1e-7])
def test_bits_that_leave_the_gap_open_are_seen_and_extended(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """U right at the edge between two gaps: float64 cannot tell, and more bits decide."""
    key, exact = bytes(32), []
    with localcontext() as context:
        context.prec = 60
        edges = [int((1 - Decimal(rate)) ** gap * 2**64) for gap in (1, 2, 5)]
    chosen = [*itertools.chain.from_iterable((edge - 1, edge, edge + 1) for edge in edges)]
    monkeypatch.setattr(poisson, "words", lambda key, first, count: np.array(chosen, np.uint64))

    def noted(key: bytes, number: int, bits: int, rate: float) -> int:
        exact.append(number)
        return _exact_gap(key, number, bits, rate)

    monkeypatch.setattr(poisson, "_exact_gap", noted)
    found = _gaps(key, 0, len(chosen), 2**60, rate).tolist()
    assert {1, 4, 7} <= set(exact)
    for number, (bits, gap) in enumerate(zip(chosen, found, strict=True)):
        extended = bits << 128 | int.from_bytes(keystream(key, (number + 1) << 64, 16))
        assert gap in slow_gap(extended, 192, rate)


@pytest.mark.parametrize("rate", [0.01, 0.5, 1 - 2.0**-50])
def test_64_zeros_leave_the_gap_open(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """U may be as small as it likes: more bits decide, whatever the rate."""
    key, chosen, asked = bytes(32), [2**63, 0], []
    monkeypatch.setattr(poisson, "words", lambda key, first, count: np.array(chosen, np.uint64))
    monkeypatch.setattr(poisson, "_exact_gap", lambda *about: asked.append(about[1]) or _exact_gap(*about))
    found = _gaps(key, 0, len(chosen), 2**60, rate).tolist()
    for number, (bits, gap) in enumerate(zip(chosen, found, strict=True)):
        extended = bits << 128 | int.from_bytes(keystream(key, (number + 1) << 64, 16))
        assert gap in slow_gap(extended, 192, rate)
    assert 1 in asked


def test_an_open_gap_is_either_with_the_odds_that_its_bits_leave() -> None:
    """At rate 1/3 and the bits that hold the edge between 1 and 2: 1,000 extensions, an exact binomial test."""
    rate = 1 / 3
    with localcontext() as context:
        context.prec = 60
        edge = (1 - Decimal(rate)) ** 2 * 2**64
        bits, odds = int(edge), float(edge - int(edge))
    gaps = np.array([_exact_gap(SeededKeys(2).key("sample", k), k, bits, rate) for k in range(1000)])
    assert set(gaps.tolist()) == {1, 2}
    assert not rare(np.array([(gaps == 2).sum()]), len(gaps), odds)
