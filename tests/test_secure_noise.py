"""Secure noise: whose numbers they are, that nobody shares them, that no key is kept, and what a release gives away."""

import base64
import copy
import io
import json
import logging
import math
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cryptography.hazmat.primitives import ciphers
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import clipless
from clipless import InvalidArgument, Private
from clipless.clipping import CLIPPINGS
from clipless.noise import STREAMS, SecureNoise, SeededNoise
from clipless.noise.keystream import LONGEST
from clipless.noise.secure_source import BLOCK, GRID_BITS, _Normals, grid

SIZE, BATCH = 40, 8


def drawn(source: SecureNoise, *sizes: int) -> list[Tensor]:
    return list(source.normals("gradient", 0, [torch.empty(size) for size in sizes]))


# The numbers are the Box-Muller transform of AES-256 in counter mode.


def reference(stream: bytes) -> np.ndarray:
    """Pairs of normals from 20 bytes each, by the textbook's formula, in extended precision."""
    pairs = len(stream) // 20
    words = np.frombuffer(stream, np.uint64, 2 * pairs)
    fine = np.frombuffer(stream, np.uint32, pairs, 16 * pairs)
    exact = np.longdouble
    uniform = ((words[:pairs] & np.uint64(2**63 - 1)).astype(exact) + (fine | 1).astype(exact) / 2**32) / exact(2) ** 63
    cell, within = words[pairs:].view(np.int64) >> 53, words[pairs:].view(np.int64) << 11
    pi = 4 * np.arctan(exact(1))
    angle = 2 * pi * (cell.astype(exact) + exact(0.5) + within.astype(exact) / exact(2) ** 64) / 2048
    radius = np.sqrt(-2 * np.log(uniform))
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)


def keystream(key: bytes, block: int, count: int) -> bytes:
    return ciphers.Cipher(AES(key), CTR(block.to_bytes(8) + bytes(8))).encryptor().update(bytes(count))


def test_the_numbers_are_those_of_the_cipher(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a key that the test knows: every block from its own counter, exact to the last bit or two of float32."""
    key = bytes(range(32))
    monkeypatch.setattr(os, "urandom", lambda count: key[:count])
    sizes = (3 * BLOCK // 2, 5, BLOCK)
    values = torch.cat(drawn(SecureNoise(), *sizes)).numpy()
    lengths = [BLOCK, BLOCK, sum(sizes) - 2 * BLOCK]
    expected = [reference(keystream(key, n, 20 * -(-size // 2)))[:size] for n, size in enumerate(lengths)]
    assert np.abs(values - np.concatenate(expected)).max() < 2.0**-21
    words = np.frombuffer(keystream(key, 0, 8 * 1000), np.uint64)
    assert np.array_equal(SecureNoise().uniform("sample", 0, 1000).numpy(), (words >> np.uint64(11)) / 2.0**53)


def test_the_transform_is_exact_in_double_precision() -> None:
    """To a few units in the last place of the radius, and to the rounding of a uniform number close to 1."""
    stream = keystream(bytes(32), 0, 20 * BLOCK // 2)

    def write(buffer: np.ndarray, count: int) -> None:
        buffer[:count] = np.frombuffer(stream, np.uint8, count)

    values, exact = _Normals()(write, BLOCK), reference(stream)
    assert values.dtype == np.float64
    radius = np.repeat(np.hypot(exact[::2], exact[1::2]), 2)
    assert (np.abs(values - exact) / (radius * 2.0**-51 + 2.0**-53 / radius)).max() < 1


@pytest.mark.parametrize(
    ("byte", "radius"), [(0x00, math.sqrt(2 * 95 * math.log(2))), (0xFF, 0.0)], ids=["longest", "shortest"]
)
def test_the_tail_ends_beyond_eleven(byte: int, radius: float) -> None:
    """The least uniform number is 2**-95, never 0; the largest is 1. P(|x| > 11.4) < 5e-30: in 10**12 numbers, never."""

    def write(buffer: np.ndarray, count: int) -> None:
        buffer[:count] = byte

    values = _Normals()(write, 10)
    assert np.hypot(values[::2], values[1::2]) == pytest.approx(radius, abs=1e-12)
    assert 2 * stats.norm.sf(math.sqrt(2 * 95 * math.log(2))) * 10**12 < 1e-17


# No keystream serves twice.


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes, int]]:
    """Key, counter and number of bytes of every piece of keystream taken from now on."""
    taken: list[tuple[bytes, bytes, int]] = []

    class Spy:
        def __init__(self, algorithm: AES, mode: CTR) -> None:
            self._place = algorithm.key, bytes(mode.nonce)
            self._cipher = ciphers_cipher(algorithm, mode).encryptor()

        def encryptor(self) -> "Spy":
            return self

        def update_into(self, data: Any, buffer: Any) -> int:
            assert not any(data), "what is encrypted must be zeros"
            taken.append((*self._place, len(data)))
            return self._cipher.update_into(data, buffer)

    ciphers_cipher = ciphers.Cipher
    monkeypatch.setattr(ciphers, "Cipher", Spy)
    return taken


def test_every_call_has_a_key_and_every_block_a_counter_of_its_own(used: list[tuple[bytes, bytes, int]]) -> None:
    source, again = SecureNoise(), SecureNoise()
    for one in (source, again, copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        for stream in STREAMS:
            list(one.normals(stream, 0, [torch.empty(2 * BLOCK + 1)]))
            list(one.release(stream, 0, [torch.zeros(3), torch.zeros(2 * BLOCK)], [1.0, 2.0]))
            one.uniform(stream, 0, 3 * LONGEST // 8)
    calls = 4 * 3 * 3
    keys = Counter(key for key, _, _ in used)
    assert len(keys) == calls
    assert set(keys.values()) == {3}
    assert all(len(key) == 32 for key in keys)
    ciphered = {(key, nonce) for key, nonce, _ in used}
    assert len(ciphered) == calls * 7 // 3, "three blocks in normals and release, one long keystream in uniform"
    assert all(nonce[8:] == bytes(8) and count < 2**40 for _, nonce, count in used), "2**64 blocks until counters meet"


SHARING = """
import copy, json, multiprocessing, os, pickle, sys
import torch
from clipless.noise import SecureNoise, SeededNoise
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(2)
SOURCE, SEEDED = SecureNoise(), SeededNoise(4)
MANY = [torch.empty(2**19)]

def numbers(source=SOURCE):
    (normals,) = source.normals("gradient", 0, MANY)
    return source.uniform("sample", 0, 8).tolist() + normals[:8].tolist() + normals[-8:].tolist()

class Drawing(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.tensor(numbers(), dtype=torch.float64)

def forked():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps([numbers(), numbers(SEEDED)]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        answer = json.loads(lines.read())
    assert os.waitpid(child, 0)[1] == 0
    return answer

if __name__ == "__main__":
    found = {"parent": numbers(), "again": numbers(), "other": numbers(SecureNoise())}
    found["copy"], found["pickle"] = numbers(copy.deepcopy(SOURCE)), numbers(pickle.loads(pickle.dumps(SOURCE)))
    seeded = [numbers(SEEDED)]
    for number in range(3):
        found[f"fork {number}"], mine = forked()
        seeded.append(mine)
    assert seeded[0] == seeded[1] == seeded[2] == seeded[3], "a seeded source is the same in every process"
    loader = DataLoader(Drawing(), batch_size=1, num_workers=2, multiprocessing_context="fork")
    found |= {f"worker {number}": row[0].tolist() for number, row in enumerate(loader)}
    found["after"] = numbers()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        rows = pool.map(numbers, [SOURCE, SOURCE], chunksize=1)
        found |= {f"spawn {number}": row for number, row in enumerate(rows)}
        pool.close()
        pool.join()
    json.dump(found, sys.stdout)
"""


def test_processes_copies_and_workers_share_nothing(tmp_path: Path) -> None:
    """Two equal ones among 14 places' 112 numbers of 53 bits: once in a million million runs. The normals, of float32,
    are compared by their runs of eight. The pool of threads is at work before every fork, and no child hangs."""
    script = tmp_path / "sharing.py"
    script.write_text(SHARING)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found) == 15
    uniforms = [number for numbers in found.values() for number in numbers[:8]]
    assert len(set(uniforms)) == len(uniforms)
    runs = [tuple(numbers[start : start + 8]) for numbers in found.values() for start in (8, 16)]
    assert len(set(runs)) == len(runs)


# It has no seed and no state.


def test_a_seed_is_refused_with_the_remedy() -> None:
    for seed in (3, 0):
        with pytest.raises(InvalidArgument, match="takes no seed.*Leave seed unset, or use noise='torch'"):
            SecureNoise(seed)
    source = SecureNoise()
    with pytest.raises(InvalidArgument, match="takes no seed"):
        source.seed = 5
    source.seed = None
    model = nn.Linear(3, 2)
    with pytest.raises(InvalidArgument, match="takes no seed.*Leave seed unset"):
        attach(model, seed=3)
    attach(model)[1].detach()


def test_a_source_has_nothing_to_keep() -> None:
    source = SecureNoise()
    assert not hasattr(source, "__dict__")
    assert source.seed is None
    assert len(pickle.dumps(source)) == len(pickle.dumps(SecureNoise())) < 200
    with pytest.raises(AttributeError):
        source.key = b""  # type: ignore[attr-defined]


def test_without_the_package_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    model = nn.Linear(3, 2)
    with pytest.raises(InvalidArgument, match="needs the package cryptography.*pip install cryptography"):
        attach(model)
    monkeypatch.undo()
    attach(model)[1].detach()


def test_without_the_package_all_else_works() -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "import clipless, clipless.noise\n"
        "clipless.noise.noise_source('torch', 3)\n"
        "try:\n    clipless.noise.noise_source('secure', None)\n"
        "except clipless.InvalidArgument as error:\n    sys.exit(0 if 'pip install cryptography' in str(error) else 2)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


# What a release gives away in its last bits.


@given(st.floats(1e-30, 1e30))
def test_the_grid_is_a_power_of_two_between_a_128th_and_a_64th_of_the_noise(stddev: float) -> None:
    assert stddev / 2 ** (GRID_BITS + 1) < grid(stddev) <= stddev / 2**GRID_BITS
    assert math.frexp(grid(stddev))[0] == 0.5


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
    st.floats(0.01, 100),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_whatever_the_values_a_release_is_on_the_grid(values: list[float], stddev: float, dtype: torch.dtype) -> None:
    sums = torch.tensor(values, dtype=dtype)
    (released,) = SecureNoise().release("gradient", 0, [sums], [stddev])
    steps = released.double() / grid(stddev)
    inside = steps.abs() < 2**24
    assert released.dtype == dtype
    assert torch.equal(steps[inside], steps[inside].round())
    assert (released - sums).abs().max() < 12 * stddev + 1e-3


def test_a_release_is_rounded_after_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding the sum before would add to its sensitivity. With a known key: exactly the rounded noised sum."""
    key = bytes(range(32))
    monkeypatch.setattr(os, "urandom", lambda count: key[:count])
    sums = torch.linspace(-3, 3, 1000)
    (released,) = SecureNoise().release("gradient", 0, [sums], [1.7])
    noised = sums.double().numpy() + 1.7 * reference(keystream(key, 0, 20 * 500))
    step = grid(1.7)
    off = np.abs(released.double().numpy() - noised)
    assert off.max() <= step / 2 * (1 + 1e-9)
    assert off.mean() > step / 5, "rounding to a finer grid would leave less"


def test_rounding_costs_next_to_nothing() -> None:
    """The variance of rounding is at most a 12th of the squared step: the deviation grows by 1.1e-5 at most."""
    for stddev in (1.0, 1.5, 1.999, 2.0, 3.7):
        assert math.sqrt(1 + grid(stddev) ** 2 / 12 / stddev**2) - 1 < 1.1e-5


def test_releases_have_the_odds_of_the_rounded_gaussian() -> None:
    """Chi-squared over the cells of the grid, of two million noised values: one false alarm in 10**8 runs."""
    stddev, value, count = 1.5, 0.3331, 2_000_000
    step = grid(stddev)
    (released,) = SecureNoise().release("gradient", 0, [torch.full((count,), value)], [stddev])
    numbers = (released.double() / step).round().numpy()
    edges = np.arange(-600, 601) + 0.5
    observed = np.histogram(numbers, np.concatenate([[-np.inf], edges, [np.inf]]))[0]
    levels = stats.norm.cdf((edges * step - value) / stddev)
    expected = count * np.diff(np.concatenate([[0], levels, [1]]))
    common = expected > 50
    rest = observed[~common].sum(), expected[~common].sum()
    distance = ((observed - expected) ** 2 / expected)[common].sum() + (rest[0] - rest[1]) ** 2 / rest[1]
    assert stats.chi2.sf(distance, common.sum()) > 1e-8


def multiples(released: Tensor, step: float) -> float:
    """The share of the numbers that are whole multiples of the step."""
    whole = released.double() / step
    return float((whole == whole.round()).double().mean())


def test_the_spacing_of_floats_tells_a_large_sum_from_a_small_one_and_not_here() -> None:
    """The attack by precision: around 1000 float32 numbers are 2**-14 apart, around 0 much closer. Noise does not hide
    that; a grid does. Half of what is on it is on twice the grid, whatever the sum, to 6 deviations: 2 in 10**9 runs."""
    small, large = torch.zeros(10_000), torch.full((10_000,), 1000.0)
    naive_small, naive_large = SeededNoise(1).release("gradient", 0, [small, large], [1.0, 1.0])
    assert multiples(naive_large, 2.0**-14) == 1
    assert multiples(naive_small, 2.0**-14) < 0.01
    safe = list(SecureNoise().release("gradient", 0, [small, large], [1.0, 1.0]))
    for released in safe:
        assert multiples(released, grid(1.0)) == 1
        assert multiples(released, 2 * grid(1.0)) == pytest.approx(0.5, abs=6 * 0.5 / 100)


# A run, end to end.


def attach(model: nn.Module, data: Dataset[Any] | None = None, **changes: Any) -> tuple[Any, Private]:
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": BATCH, "steps": 6, "noise": "secure"} | changes
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SIZE, 3, generator=generator), torch.randint(2, (SIZE,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = TensorDataset(x, y) if data is None else data
    return optimizer, clipless.make_private(model, optimizer, records, **settings)


def train(model: nn.Module, optimizer: Any, private: Private, part: int | None = None) -> list[Tensor]:
    """The released gradients of all steps of one pass."""
    released = []
    for batch in private.loader if part is None else private.loader.microbatches(part):
        for x, y in [batch] if part is None else batch:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return released


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Records that are fetched one by one, ahead of the training loop, by workers."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3,), float(index)), torch.tensor(index % 2)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_secure_run_trains(clipping: str) -> None:
    model = nn.Linear(3, 2)
    optimizer, private = attach(model, clipping=clipping)
    assert private.plan.noise == "secure"
    assert "source secure" in str(private.plan)
    released = train(model, optimizer, private)
    private.detach()
    assert private.ledger.steps == len(released) == 6
    assert all(gradient.isfinite().all() for gradient in released)
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_gradient_that_the_optimizer_reads_is_on_the_grid() -> None:
    model = nn.Linear(3, 2)
    optimizer, private = attach(model, clipping=clipless.abadi(threshold=2.0))
    for gradient in train(model, optimizer, private):
        assert multiples(gradient * BATCH, grid(2.0)) == 1
    private.detach()


def test_the_statistic_that_is_released_is_on_the_grid() -> None:
    model = nn.Linear(3, 2)
    optimizer, private = attach(model, clipping="dc-e")
    train(model, optimizer, private)
    private.detach()
    assert private.plan.statistic_multiplier is not None
    assert multiples(private.history["statistic"], grid(private.plan.statistic_multiplier)) == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("part", [None, 3])
def test_batches_that_are_fetched_ahead_are_those_that_are_announced(part: int | None, workers: int) -> None:
    """Each draw is made once, though fetcher and loop both need it: sizes agree, records differ from pass to pass."""
    model = nn.Linear(3, 2)
    data = DataLoader(Rows(), batch_size=BATCH, num_workers=workers)
    optimizer, private = attach(model, data, batch_size=None, steps=None, epochs=3)
    passes = []
    for _ in range(private.epochs):
        seen = []
        for batch in private.loader.microbatches(part) if part else ([whole] for whole in private.loader):
            for x, y in batch:
                seen += x[:, 0].tolist()
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            seen.append(-1.0)
        passes.append(tuple(seen))
    private.detach()
    assert private.ledger.steps == 15
    assert len(set(passes)) == 3


GENERATORS = [
    (torch.Tensor, "normal_"), (torch.Tensor, "uniform_"), (torch.Tensor, "bernoulli_"), (torch.Tensor, "random_"),
    (torch, "randn"), (torch, "rand"), (torch, "normal"), (torch, "bernoulli"), (torch, "randint"), (torch, "randperm"),
    (torch, "randn_like"), (torch, "rand_like"), (torch, "Generator"), (np.random, "default_rng"),
    (np.random, "SeedSequence"), (np.random, "normal"), (np.random, "random"), (np.random, "rand"),
    (SeededNoise, "normals"), (SeededNoise, "release"), (SeededNoise, "uniform"),
]  # fmt: skip


@pytest.mark.parametrize("clipping", ["auto-s", "dc-e", "quantile"])
def test_everything_that_is_released_comes_from_the_secure_source(
    clipping: str, monkeypatch: pytest.MonkeyPatch, used: list[tuple[bytes, bytes, int]]
) -> None:
    """PITFALLS 22: sampling, gradient and statistic; no generator of torch or numpy is asked for anything."""
    model = nn.Linear(3, 2)
    optimizer, private = attach(model, clipping=clipping)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a generator was used that is not the secure one")

    for owner, name in GENERATORS:
        monkeypatch.setattr(owner, name, refuse)
    used.clear()
    before = torch.get_rng_state()
    train(model, optimizer, private)
    private.detach()
    assert torch.equal(torch.get_rng_state(), before)
    statistic = private.plan.statistic_multiplier is not None
    assert (statistic, clipping != "auto-s") in {(True, True), (False, False)}
    assert len(used) == 6 * (3 if statistic else 2), "sample, gradient and statistic of every step"


def test_the_same_global_seed_gives_another_run() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        np.random.seed(5)
        model = nn.Linear(3, 2)
        optimizer, private = attach(model, clipping="dc-e")
        runs.append((train(model, optimizer, private), private.history["statistic"]))
        private.detach()
    (one, one_statistic), (other, other_statistic) = runs
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one_statistic, other_statistic)


def test_a_resumed_run_goes_on_with_new_noise() -> None:
    """From one saved state twice: the same ledger, thresholds and number of draws, and other noise."""
    model = nn.Linear(3, 2)
    optimizer, private = attach(model, clipping="dc-e", steps=None, epochs=2)
    first = train(model, optimizer, private)
    state, thresholds = private.state_dict(), private.thresholds
    private.detach()
    assert state["seed"] is None
    futures = []
    for _ in range(2):
        optimizer, private = attach(model, clipping="dc-e", steps=None, epochs=2)
        private.load_state_dict(state)
        assert torch.equal(private.thresholds, thresholds)
        assert (private.ledger.steps, private.loader.draws) == (len(first), len(first))
        futures.append(train(model, optimizer, private))
        private.detach()
        assert private.ledger.steps == 2 * len(first)
    everything = [*first, *futures[0], *futures[1]]
    assert len({tuple(gradient.tolist()) for gradient in everything}) == len(everything)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every key that the operating system gives out during the test."""
    given_out: list[bytes] = []
    system = os.urandom

    def urandom(count: int) -> bytes:
        given_out.append(system(count))
        return given_out[-1]

    monkeypatch.setattr(os, "urandom", urandom)
    return given_out


def test_no_key_is_written_anywhere(
    keys: list[bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """State, pickle, text forms, ledger and checkpoint files, logs and output: no key, raw or in any usual spelling."""
    caplog.set_level(logging.DEBUG)
    model = nn.Linear(3, 2)
    optimizer, private = attach(model, clipping="dc-e")
    private.save_to(tmp_path / "ledger.jsonl")
    train(model, optimizer, private)
    private.save_checkpoint(tmp_path / "run.ckpt")
    saved = io.BytesIO()
    torch.save(private.state_dict(), saved)
    private.detach()
    written = [
        saved.getvalue(),
        pickle.dumps(private._source),
        *(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()),
    ]
    shown = capfd.readouterr()
    texts = [repr(private), str(vars(private)), str(private.plan), repr(private._source), caplog.text, *shown]
    texts += [str(private.state_dict()), str(private.spent()), str(private.history.to_dict())]
    haystack = b"\n".join([*written, *(text.encode() for text in texts)])
    taken = [key for key in keys if len(key) == 32]
    assert len(taken) >= 18
    for key in taken:
        numbers = int.from_bytes(key), int.from_bytes(key, "little")
        spellings = [
            key,
            key[::-1],
            key.hex().encode(),
            base64.b64encode(key),
            repr(key).encode(),
            str(list(key)).encode(),
        ]
        spellings += [str(number).encode() for number in numbers]
        assert not any(spelling in haystack for spelling in spellings)
