"""The normal numbers of the seeded source: what they are, and that compiled and numpy's are the same."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from clipless.compiled import LIBRARY, SOURCES
from clipless.noise import STREAMS, SeededNoise, adding
from clipless.noise import normals as transform
from clipless.noise.adding import BLOCK
from clipless.noise.normals import CHUNK, Words, arithmetic, compiled
from compiling import build_hook, needs_compiler

HALF = CHUNK // 2


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled now from the source as it stands."""
    library = tmp_path_factory.mktemp("build") / LIBRARY.name
    assert build_hook().compile_all(SOURCES, library) is None
    return library


def random_words(chunks: int, seed: int = 1) -> Words:
    return np.random.default_rng(seed).integers(0, 2**32, chunks * CHUNK, np.uint32)


def by_the_textbook(words: Words) -> tuple[np.ndarray, np.ndarray]:
    """Normals and their radii in extended precision: the words' two halves are the uniform numbers of Box-Muller."""
    first, second = words.reshape(-1, 2, HALF).transpose(1, 0, 2)
    exact = np.longdouble
    # The uniform number is float32's nearest, as there is nothing to gain from more of it.
    uniform = ((first >> 1).astype(np.float32) + np.float32(0.5)).astype(exact) / exact(2) ** 31
    quarter, within = second >> np.uint32(30), (second << np.uint32(2)).view(np.int32)
    turn = np.choose(quarter, [0, 2, 3, 1]) / exact(4) + within.astype(exact) / exact(2) ** 34
    angle, radius = 8 * np.arctan(exact(1)) * turn, np.sqrt(-2 * np.log(uniform))
    x, y = radius * np.cos(angle), radius * np.sin(angle)
    return np.stack([x, y], axis=1).reshape(-1), np.stack([radius, radius], axis=1).reshape(-1)


# What they are.


def test_they_are_box_mullers_to_the_last_bits_of_float32() -> None:
    words = random_words(500)
    exact, radius = by_the_textbook(words)
    arithmetic(words)
    assert (np.abs(words.view(np.float32) - exact) / radius).max() < 2.0**-22


@pytest.mark.parametrize(
    ("word", "radius"),
    [(0, math.sqrt(2 * 32 * math.log(2))), (2**32 - 1, 0.0), (2**31, math.sqrt(2 * math.log(2)))],
    ids=["longest", "shortest", "median"],
)
def test_the_radius_is_finite_and_ends_beyond_six(word: int, radius: float) -> None:
    words = np.full(CHUNK, word, np.uint32)
    arithmetic(words)
    values = words.view(np.float32)
    assert np.hypot(values[:HALF], values[HALF:]) == pytest.approx(radius, abs=1e-6)


def test_the_distribution_is_normal_to_its_tails() -> None:
    """10^7 numbers: moments within 5 sigma, Kolmogorov and the counts beyond 1 to 5. One seed in 10^5 gives an alarm."""
    count = 10**7
    (drawn,) = SeededNoise(11).normals("gradient", 3, [torch.empty(count)])
    values = drawn.double().numpy()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs((values**power).mean() - moment) < 5 * math.sqrt(variance / count), power
    assert stats.kstest(values, "norm").pvalue > 1e-6
    for bound in range(1, 6):
        for side in (values, -values):
            expected = count * stats.norm.sf(bound)
            assert abs((side > bound).sum() - expected) < 5 * math.sqrt(expected) + 5, bound


@pytest.mark.parametrize("lag", [1, 2, HALF, CHUNK, BLOCK, BLOCK - 1])
def test_neighbours_pairs_and_blocks_are_independent(lag: int) -> None:
    """Correlation of the numbers and of their squares, 5 sigma: one seed in 10^5 gives an alarm."""
    (drawn,) = SeededNoise(12).normals("gradient", 0, [torch.empty(8 * BLOCK)])
    values = drawn.double()
    for one in (values, values.square() - 1, values.abs() - math.sqrt(2 / math.pi)):
        one, scale = one / one.std(), math.sqrt(len(values) - lag)
        assert abs((one[lag:] * one[:-lag]).mean().item()) * scale < 5


def test_the_words_are_those_of_the_cipher() -> None:
    """Every block has its own counter, and what two tensors share of one is laid end to end."""
    source = SeededNoise(7)
    sizes = (BLOCK - 5, 9, BLOCK + 3)
    drawn = torch.cat(list(source.normals("gradient", 4, [torch.empty(size) for size in sizes]))).numpy()
    key = source._key("gradient", 4)
    for number, start in enumerate(range(0, sum(sizes), BLOCK)):
        part = drawn[start : start + BLOCK]
        stream = Cipher(AES(key), CTR(number.to_bytes(8) + bytes(8))).encryptor().update(bytes(4 * BLOCK))
        words = np.frombuffer(stream, np.uint32)[: -(-len(part) // CHUNK) * CHUNK].copy()
        arithmetic(words)
        assert np.array_equal(words.view(np.float32)[: len(part)], part)


def test_no_two_uses_have_the_same_key() -> None:
    uses = itertools.product((0, 1, 11, 2**128 - 1), sorted(STREAMS), (0, 1, 10, 11, 111), ((), (0,), (1,), (11,)))
    keys = [SeededNoise(seed)._key(stream, step, *place) for seed, stream, step, place in uses]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}


# Compiled and numpy's.


def assert_same(library: Path, words: Words) -> None:
    """The library gives numpy's numbers for these words, which are overwritten."""
    expected = words.copy()
    arithmetic(expected)
    in_one_pass = compiled(library)
    assert in_one_pass is not None
    in_one_pass(words)
    assert np.array_equal(words, expected)


@needs_compiler
@given(st.integers(1, 4), st.integers(0, 2**32 - 1), st.data())
def test_compiled_and_numpy_agree_bit_for_bit(fresh: Path, chunks: int, seed: int, data: st.DataObject) -> None:
    words = random_words(chunks, seed)
    for _ in range(data.draw(st.integers(0, 8))):
        words[data.draw(st.integers(0, len(words) - 1))] = data.draw(st.integers(0, 2**32 - 1))
    assert_same(fresh, words)


@needs_compiler
def test_compiled_and_numpy_agree_on_millions(fresh: Path) -> None:
    """All radii that differ in their 21 upper bits, with angles at random."""
    radii = np.arange(2**21, dtype=np.uint32) << np.uint32(11)
    radii ^= random_words(2**21 // CHUNK, 2) >> np.uint32(21)
    words = np.stack([radii.reshape(-1, HALF), random_words(2**21 // CHUNK, 3).reshape(-1, HALF)], axis=1).reshape(-1)
    assert_same(fresh, words)


@pytest.mark.parametrize("other", [torch.float32, torch.float64])
def test_a_release_is_the_same_with_and_without_the_library(
    other: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = [torch.randn(300, 999), torch.zeros(()), torch.randn(5, dtype=other), torch.randn(7).bfloat16()]
    stddevs = [0.5, 1.0, 2.0, 3.0]
    with_it = list(SeededNoise(5).release("gradient", 1, sums, stddevs))
    monkeypatch.setattr(transform, "compiled", lambda: None)
    monkeypatch.setattr(adding, "compiled", lambda: None)
    without = list(SeededNoise(5).release("gradient", 1, sums, stddevs))
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
    assert [value.dtype for value in with_it] == [torch.float32, torch.float32, other, torch.float32]


@needs_compiler
@given(
    st.lists(st.one_of(st.integers(0, 3000), st.integers(BLOCK - 3, BLOCK + 3)), max_size=6),
    st.binary(min_size=32, max_size=32),
    st.booleans(),
)
def test_compiled_and_numpys_sums_agree_bit_for_bit(sizes: list[int], key: bytes, in_place: bool) -> None:
    fast = adding.compiled()
    if fast is None:
        pytest.skip("this processor has no AES of its own")
    sums = [torch.linspace(-1, 1, size) for size in sizes]
    stddevs = [0.3 * number + 1e-3 for number in range(len(sizes))]
    expected = [torch.empty_like(line) for line in sums]
    adding.by_numpy(key, sums, stddevs, expected)
    into = sums if in_place else [torch.empty_like(line) for line in sums]
    fast(key, sums, stddevs, into)
    assert all(torch.equal(one, other) for one, other in zip(into, expected, strict=True))


@pytest.mark.parametrize("size", [7, BLOCK + 1])
def test_release_adds_the_numbers_that_are_drawn(size: int) -> None:
    sums = [torch.randn(size), torch.randn(3)]
    drawn = SeededNoise(5).normals("gradient", 1, sums)
    released = SeededNoise(5).release("gradient", 1, sums, [0.5, 2.0])
    for value, noise, out, stddev in zip(sums, drawn, released, (0.5, 2.0), strict=True):
        assert torch.equal(out, value + noise * stddev)
