"""The normal numbers of a key: what they are, and that compiled and numpy's releases are the same."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from hypothesis import given
from hypothesis import strategies as st

from clipless.native import LIBRARY, SOURCES
from clipless.native.noise import build
from clipless.noise import adding, noise_source, normals, source
from clipless.noise.adding import by_numpy
from clipless.noise.keys import words
from clipless.noise.normals import CHUNK, PAIRS, Words, box_muller, chunks_by_numpy, standard_normals
from compiling import build_hook, loaded, needs_compiler


def random_words(chunks: int, seed: int = 1) -> Words:
    return np.random.default_rng(seed).integers(0, 2**64, chunks * CHUNK, np.uint64)


def by_the_textbook(words: Words) -> tuple[np.ndarray, np.ndarray]:
    """Normals and their radii in extended precision. Of a pair's two words the first and 24 bits of the second are the
    uniform number of the radius, the others the angle."""
    first, second = words.reshape(-1, 2, PAIRS).transpose(1, 0, 2)
    exact = np.longdouble
    fine = (second >> np.uint64(3)) & np.uint64(2**24 - 1) | np.uint64(1)
    uniform = first.astype(exact) / exact(2) ** 64 + fine.astype(exact) / exact(2) ** 88
    eighth = ((second >> np.uint64(27)).astype(exact) + exact(0.5)) / exact(2) ** 37
    angle, radius = np.arctan(exact(1)) * eighth, np.sqrt(-2 * np.log(uniform))
    near, far = radius * np.cos(angle), radius * np.sin(angle)
    swapped = (second & np.uint64(4)) != 0
    x, y = np.where(swapped, far, near), np.where(swapped, near, far)
    x, y = np.where(second & np.uint64(1), -x, x), np.where(second & np.uint64(2), -y, y)
    return np.stack([x, y], axis=1).reshape(-1), np.stack([radius, radius], axis=1).reshape(-1)


def test_they_are_box_mullers_in_double_precision() -> None:
    """To two units in the last place of the radius, and to the rounding of a uniform number close to 1."""
    words = random_words(500)
    exact, radius = by_the_textbook(words)
    assert (np.abs(box_muller(words) - exact) / (radius * 2.0**-51 + 2.0**-53 / radius)).max() < 2


@pytest.mark.parametrize(
    ("word", "radius"),
    [(0, math.sqrt(2 * 88 * math.log(2))), (2**64 - 1, 0.0), (2**63, math.sqrt(2 * math.log(2)))],
    ids=["longest", "shortest", "median"],
)
def test_the_tail_ends_beyond_eleven(word: int, radius: float) -> None:
    """The least uniform number is 2**-88, never 0; the largest is 1. In 10**12 numbers nobody misses what lies beyond."""
    values = box_muller(np.full(CHUNK, word, np.uint64))
    assert np.hypot(values[:PAIRS], values[PAIRS:]) == pytest.approx(radius, abs=1e-12)
    assert math.erfc(11.04 / math.sqrt(2)) * 10**12 < 1e-15


def test_every_eighth_of_the_circle_is_reached_alike() -> None:
    """With the same radius and place within the eighth: the eight images of one point under the square's symmetries."""
    words = np.zeros((2, PAIRS), np.uint64)
    words[0], words[1] = 2**62, (5 << 27) + np.arange(PAIRS, dtype=np.uint64) % 8
    x, y = box_muller(words.reshape(-1)).reshape(2, PAIRS)
    points = {(float(a), float(b)) for a, b in zip(x, y, strict=True)}
    near, far = max(abs(x)), min(abs(x))
    assert points == {(s * a, t * b) for a, b in ((near, far), (far, near)) for s in (1, -1) for t in (1, -1)}


def test_the_words_are_those_of_the_cipher() -> None:
    """AES-256 in counter mode from counter 0 on, 512 blocks of it for each chunk, wherever a release begins."""
    key, count = bytearray(range(32)), 70 * CHUNK + 5
    stream = Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(8 * 71 * CHUNK))
    assert np.array_equal(standard_normals(key, count), box_muller(np.frombuffer(stream, np.uint64))[:count])


@pytest.mark.parametrize("other", [torch.float32, torch.float64])
def test_a_release_is_the_same_with_and_without_the_library(
    other: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = [torch.randn(300, 999), torch.zeros(()), torch.randn(5, dtype=other), torch.randn(7).bfloat16()]
    stddevs = [0.5, 1.0, 2.0, 3.0]
    loaded(adding)
    with_it = noise_source("seeded", 5).release("gradient", 1, sums, stddevs, 7.0)
    monkeypatch.setattr(source, "compiled", lambda: None)
    without = noise_source("seeded", 5).release("gradient", 1, sums, stddevs, 7.0)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
    assert [value.dtype for value in with_it] == [torch.float32, torch.float32, other, torch.float32]


def test_numbers_that_were_added_and_the_bits_they_came_from_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the memory later finds no noise of a step that was released."""
    bits, numbers = [], []

    def watched_words(key: bytes | bytearray, counter: int, count: int) -> Any:
        bits.append(words(key, counter, count))
        return bits[-1]

    def watched_chunks(key: bytearray, first: int, chunks: int) -> Any:
        numbers.append(chunks_by_numpy(key, first, chunks))
        assert numbers[-1].any()
        return numbers[-1]

    monkeypatch.setattr(normals, "words", watched_words)
    sums = [torch.zeros(3 * CHUNK - 5), torch.zeros(5), torch.zeros(70 * CHUNK)]
    made = [torch.empty_like(each) for each in sums]
    by_numpy(bytearray(range(32)), sums, [1.0, 2.0, 3.0], 1.0, made, chunks=watched_chunks)
    assert all(each.any() for each in made)
    assert sum(len(each) for each in numbers) == sum(len(each) for each in bits) == 73 * CHUNK
    assert not any(each.any() for each in [*bits, *numbers])


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled now from the source as it stands."""
    library = tmp_path_factory.mktemp("build") / LIBRARY.name
    assert build_hook().compile_all(SOURCES, library) is None
    return library


@needs_compiler
@given(
    st.lists(st.one_of(st.integers(0, 3000), st.integers(8 * CHUNK - 3, 8 * CHUNK + 3)), max_size=6),
    st.binary(min_size=32, max_size=32),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_compiled_and_numpys_releases_agree_bit_for_bit(
    fresh: Path, sizes: list[int], key: bytes, narrow: bool, seed: int
) -> None:
    loaded(adding, fresh)
    fast = build(fresh, narrow=narrow)
    assert fast is not None
    numbers = np.random.default_rng(seed)
    scales = [10.0 ** float(numbers.integers(-9, 9)) for _ in sizes]
    sums = [
        torch.from_numpy((scale * numbers.standard_normal(size)).astype(np.float32))
        for scale, size in zip(scales, sizes, strict=True)
    ]
    if sums and len(sums[0]) > 3:
        sums[0][:4] = torch.tensor([math.inf, -math.inf, math.nan, 3e38])
    stddevs = [10.0 ** numbers.uniform(-30, 30) for _ in sizes]
    weight = 1 / float(numbers.integers(1, 10**6))
    ours, expected = ([torch.empty_like(line) for line in sums] for _ in range(2))
    by_numpy(bytearray(key), sums, stddevs, weight, expected)
    fast.add(bytearray(key), sums, stddevs, weight, ours)
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(ours, expected, strict=True))


@needs_compiler
def test_compiled_and_numpy_agree_on_millions(fresh: Path) -> None:
    fast = loaded(adding, fresh)
    sums, key = [torch.linspace(-2, 2, 4_000_001)], bytearray(range(32))
    ours, expected = [torch.empty_like(sums[0])], [torch.empty_like(sums[0])]
    fast.add(key, sums, [1e-5], 1 / 3, ours)
    by_numpy(key, sums, [1e-5], 1 / 3, expected)
    assert torch.equal(ours[0], expected[0])
    numbers = torch.empty(2000 * CHUNK, dtype=torch.float64)
    fast.normals(key, numbers, 0)
    assert np.array_equal(numbers.numpy(), standard_normals(key, len(numbers)))


@needs_compiler
@pytest.mark.parametrize("places", [None, [3, 5 * CHUNK + 11, 200 * CHUNK]])
def test_sums_in_double_precision_are_the_same_from_compiled_numbers(fresh: Path, places: list[int] | None) -> None:
    """Statistics of thresholds are in float64, which the compiled release does not take."""
    fast = loaded(adding, fresh)
    key, stddevs = bytearray(range(32)), [0.3, 2.0, 0.7]
    sums = [torch.linspace(-2, 2, size, dtype=torch.float64) for size in (21, CHUNK + 1, 70 * CHUNK)]
    ours, expected = ([torch.empty_like(each) for each in sums] for _ in range(2))
    by_numpy(key, sums, stddevs, 1 / 3, ours, places, adding.chunks_by(fast))
    by_numpy(key, sums, stddevs, 1 / 3, expected, places)
    assert all(torch.equal(a.view(torch.int64), b.view(torch.int64)) for a, b in zip(ours, expected, strict=True))
    assert adding.chunks_by(None) is chunks_by_numpy
