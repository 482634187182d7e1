"""What a release gives away in its last bits, for every source, and a run with secure noise from end to end."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import clipless
from clipless import InvalidArgument, Private
from clipless.clipping import CLIPPINGS
from clipless.noise import NoiseSource, keys, noise_source
from clipless.noise.adding import grid
from clipless.noise.keys import ForwardKeys, SeededKeys
from noising import assert_on_grid, seeded_normals

SIZE, BATCH = 40, 8


@pytest.fixture(params=["secure", "seeded"])
def source(request: pytest.FixtureRequest) -> NoiseSource:
    return noise_source(request.param, 3 if request.param == "seeded" else None)


def test_without_the_cipher_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MISSING", True)
    model = nn.Linear(3, 2)
    for seed in (None, 3):
        with pytest.raises(InvalidArgument, match="needs the package cryptography.*pip install cryptography"):
            attach(model, seed=seed)
    monkeypatch.undo()
    attach(model)[1].detach()


def test_without_the_cipher_all_else_works() -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "import clipless, clipless.noise\n"
        "try:\n    clipless.noise.noise_source()\n"
        "except clipless.InvalidArgument as error:\n    sys.exit(0 if 'pip install cryptography' in str(error) else 2)\n"
        "sys.exit(3)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


# What a release gives away in its last bits.


@given(st.floats(1e-30, 1e30))
def test_the_grid_is_a_power_of_two_between_a_128th_and_a_64th_of_the_noise(stddev: float) -> None:
    assert stddev / 128 < grid(stddev) <= stddev / 64
    assert math.frexp(grid(stddev))[0] == 0.5


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
    st.floats(0.01, 100),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_whatever_the_values_a_release_is_on_the_grid(values: list[float], stddev: float, dtype: torch.dtype) -> None:
    sums = torch.tensor(values, dtype=dtype)
    (released,) = noise_source().release("gradient", 0, [sums], [stddev])
    steps = released.double() / grid(stddev)
    inside = steps.abs() < 2**24
    assert released.dtype == dtype
    assert torch.equal(steps[inside], steps[inside].round())
    assert (released - sums).abs().max() < 12 * stddev + 1e-3


def test_a_release_is_rounded_after_the_noise() -> None:
    """Rounding the sum before would add to its sensitivity. With known numbers: exactly the rounded noised sum."""
    sums = torch.linspace(-3, 3, 1000)
    (released,) = noise_source("seeded", 5).release("gradient", 2, [sums], [1.7])
    noised = sums.double() + 1.7 * seeded_normals(5, "gradient", 2, [sums])[0]
    assert_on_grid(released, noised, 1.7, 1e-12)
    assert (released - noised).abs().mean() > grid(1.7) / 5, "rounding to a finer grid would leave less"


def test_rounding_costs_next_to_nothing() -> None:
    """The variance of rounding is at most a 12th of the squared step: the deviation grows by 1.1e-5 at most."""
    for stddev in (1.0, 1.5, 1.999, 2.0, 3.7):
        assert math.sqrt(1 + grid(stddev) ** 2 / 12 / stddev**2) - 1 < 1.1e-5


def test_releases_have_the_odds_of_the_rounded_gaussian(source: NoiseSource) -> None:
    """Chi-squared over the cells of the grid, of two million noised values: one false alarm in 10**8 runs."""
    stddev, value, count = 1.5, 0.3331, 2_000_000
    step = grid(stddev)
    (released,) = source.release("gradient", 0, [torch.full((count,), value)], [stddev])
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


def test_the_spacing_of_floats_tells_a_large_sum_from_a_small_one_and_not_here(source: NoiseSource) -> None:
    """The attack by precision: around 1000 float32 numbers are 2**-14 apart, around 0 much closer. Noise does not hide
    that; a grid does. Half of what is on it is on twice the grid, whatever the sum, to 6 deviations: 2 in 10**9 runs."""
    small, large = torch.zeros(10_000), torch.full((10_000,), 1000.0)
    numbers = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert multiples(large + numbers, 2.0**-14) == 1
    assert multiples(small + numbers, 2.0**-14) < 0.01
    for released in source.release("gradient", 0, [small, large], [1.0, 1.0]):
        assert multiples(released, grid(1.0)) == 1
        assert multiples(released, 2 * grid(1.0)) == pytest.approx(0.5, abs=6 * 0.5 / 100)


# A run, end to end.


def attach(model: nn.Module, data: Dataset[Any] | None = None, **changes: Any) -> tuple[Any, Private]:
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": BATCH, "steps": 6} | changes
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SIZE, 3, generator=generator), torch.randint(2, (SIZE,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = TensorDataset(x, y) if data is None else data
    return optimizer, clipless.make_private(model, optimizer, records, **{"loss_reduction": "mean", **settings})


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


@pytest.mark.parametrize("divisor", [1.0, 8.0, 7.0])
def test_division_comes_after_the_rounding(divisor: float) -> None:
    sums = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    (whole,) = noise_source("seeded", 5).release("gradient", 2, [sums], [1.7])
    (divided,) = noise_source("seeded", 5).release("gradient", 2, [sums], [1.7], divisor)
    assert torch.equal(divided, (whole.double() * (1 / divisor)).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_of_values_get_the_noise_that_they_get_in_the_whole(dtype: torch.dtype) -> None:
    """By the compiled code and by numpy, at borders of chunks and inside them, divided as the whole is."""
    sizes, stddevs = [3000, 5, 2500], [0.3, 1.7, 40.0]
    sums = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0), dtype=dtype).split(sizes)
    whole = noise_source("seeded", 5).release("gradient", 2, sums, stddevs, 7.0)
    for cuts in ([(0, 1024), (0, 0), (1, 2)], [(1024, 3000), (0, 5), (0, 2500)], [(1500, 1501), (3, 5), (2048, 2500)]):
        places = [start + first for start, (first, _) in zip((0, 3000, 3005), cuts, strict=True)]
        parts = [total[first:last] for total, (first, last) in zip(sums, cuts, strict=True)]
        released = noise_source("seeded", 5).release("gradient", 2, parts, stddevs, 7.0, places)
        for total, part, (first, last) in zip(whole, released, cuts, strict=True):
            assert torch.equal(part, total[first:last])


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
    (SeededKeys, "key"),
]  # fmt: skip


@pytest.mark.parametrize("clipping", ["auto-s", "dc-e", "quantile"])
def test_everything_that_is_released_comes_from_the_secure_source(
    clipping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling, gradient and statistic; no generator of torch or numpy is asked for anything."""
    model = nn.Linear(3, 2)
    optimizer, private = attach(model, clipping=clipping)
    asked: list[tuple[str, int]] = []
    key = ForwardKeys.key

    def spied(keys: ForwardKeys, stream: str, place: int) -> bytearray:
        asked.append((stream, place))
        return key(keys, stream, place)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a generator was used that is not the secure one")

    monkeypatch.setattr(ForwardKeys, "key", spied)
    for owner, name in GENERATORS:
        monkeypatch.setattr(owner, name, refuse)
    before = torch.get_rng_state()
    train(model, optimizer, private)
    private.detach()
    assert torch.equal(torch.get_rng_state(), before)
    statistic = private.plan.statistic_multiplier is not None
    assert statistic == (clipping != "auto-s")
    streams = ["sample", "gradient", *(["statistic"] if statistic else [])]
    assert asked == [(stream, step) for step in range(6) for stream in streams]


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


def test_two_runs_from_one_state_are_the_same_and_a_third_with_new_keys_is_not() -> None:
    model = nn.Linear(3, 2)
    optimizer, private = attach(model, clipping="dc-e", steps=None, epochs=2)
    first = train(model, optimizer, private)
    state, weights = private.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    private.detach()
    futures = []
    for renewed in (False, False, True):
        model.load_state_dict(weights)
        optimizer, private = attach(model, clipping="dc-e", steps=None, epochs=2)
        private.load_state_dict(state)
        assert (private.ledger.steps, private.loader.draws) == (len(first), len(first))
        if renewed:
            private._source.renew(private.steps_taken, private.loader.draws)
        futures.append(train(model, optimizer, private))
        private.detach()
    same, again, other = futures
    assert all(torch.equal(a, b) for a, b in zip(same, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(same, other, strict=True))
    assert not any(torch.equal(a, b) for a in first for b in same)
