"""One suite for every registered noise source: its numbers are normal, uniform and independent, whoever draws them.

Sources that cannot be seeded give other numbers in every run, so each test states its false-alarm rate: all tests of
this file together raise one in less than a million runs.
"""

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from clipless.errors import InvalidArgument
from clipless.noise import NOISE_SOURCES, STREAMS, NoiseSource, noise_source
from clipless.noise.normals import standard_normals
from clipless.plan import RESERVE
from clipless.sampling.loader import PoissonSampler
from noising import assert_on_grid, seeded_normals

DRAWS = 10**7
# The odds that a right source fails one single comparison.
RARE = 5e-9


def make(name: str, seed: int = 3) -> NoiseSource:
    return noise_source(name, seed if name == "seeded" else None)


@pytest.fixture(params=NOISE_SOURCES)
def source(request: pytest.FixtureRequest) -> NoiseSource:
    return make(request.param)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def flat(source: NoiseSource, stream: str, step: int, *sizes: int) -> Tensor:
    """The numbers that a release adds, before they are rounded to the grid."""
    return torch.from_numpy(standard_normals(source._keys.key(stream, step), sum(sizes)))


# Normality.


def faults(values: np.ndarray) -> Iterator[str]:
    """The comparisons that a sample of independent standard normal numbers fails, each with odds of at most RARE.

    Moments to the fourth (normal approximation, at ten million draws), both tails beyond 3, 4 and 5 by their exact binomial
    counts, and Kolmogorov-Smirnov: 11 comparisons.
    """
    count = len(values)
    moments = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}
    bound = stats.norm.isf(RARE / 2)
    powers = np.ones_like(values)
    for power, (mean, variance) in moments.items():
        powers *= values
        if not abs(powers.mean() - mean) < bound * math.sqrt(variance / count):
            yield f"moment {power}"
    for edge, sign in itertools.product((3, 4, 5), (1, -1)):
        beyond = int((sign * values > edge).sum())
        expected = stats.binom(count, stats.norm.sf(edge))
        if min(expected.cdf(beyond), expected.sf(beyond - 1)) < RARE / 2:
            yield f"tail at {sign * edge}"
    levels = special.ndtr(np.sort(values))
    steps = np.arange(count + 1) / count
    if stats.kstwobign.sf(max((steps[1:] - levels).max(), (levels - steps[:-1]).max()) * math.sqrt(count)) < RARE:
        yield "Kolmogorov-Smirnov"


# Sources that draw from the same kind of keys give numbers of the same kind.
KINDS = {type(make(name)._keys): name for name in reversed(NOISE_SOURCES)}


@pytest.mark.parametrize("name", KINDS.values())
def test_ten_million_numbers_are_normal(name: str) -> None:
    """False alarms: 11 comparisons, 6 in a hundred million runs. The sizes put tensors across the borders of blocks."""
    sizes = (784 * 1024, 1024, 7, 1, 0, 2**18, 1_000_000 - 784 * 1024 - 1024 - 8)
    source = make(name)
    parts = [flat(source, "gradient", step, *sizes) for step in range(9)]
    values = torch.cat(parts)[:DRAWS].double().numpy()
    assert len(values) == DRAWS
    assert list(faults(values)) == []


FAULTY: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "too small by 0.3 %": lambda g: 0.997 * g.standard_normal(DRAWS),
    "shifted": lambda g: g.standard_normal(DRAWS) + 0.003,
    "twelve uniforms": lambda g: g.random((12, DRAWS // 12)).sum(0) - 6,
    "cut off at 4": lambda g: g.standard_normal(DRAWS).clip(-4, 4),
    "one in 250 is zero": lambda g: np.where(g.random(DRAWS) < 1 / 250, 0, g.standard_normal(DRAWS)),
    "heavy tail": lambda g: np.where(g.random(DRAWS) < 1e-5, 6, 1) * g.standard_normal(DRAWS),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_the_normality_test_finds(fault: str) -> None:
    assert next(faults(FAULTY[fault](np.random.default_rng(5))), None) is not None


# Independence.


def uncorrelated(one: Tensor, other: Tensor) -> bool:
    """Neither the numbers nor their squares are correlated, at odds of RARE each."""
    bound = stats.norm.isf(RARE / 2) / math.sqrt(len(one))
    pairs = [(one, other), ((one**2 - 1) / math.sqrt(2), (other**2 - 1) / math.sqrt(2))]
    return all(abs(float((a * b).mean())) < bound for a, b in pairs)


def test_streams_and_steps_are_independent(source: NoiseSource) -> None:
    """21 pairs of seven places, two correlations each: 2.1 in ten million runs."""
    places = [("gradient", 0), ("gradient", 1), ("gradient", 2**8), ("statistic", 0), ("statistic", 1), ("sample", 0)]
    drawn = [flat(source, *place, 200_000).double() for place in places]
    drawn.append(flat(source, "gradient", 2, 100_000, 100_000).double())
    assert all(uncorrelated(a, b) for a, b in itertools.combinations(drawn, 2))


@pytest.mark.parametrize("name", KINDS.values())
def test_numbers_of_one_release_are_independent(name: str) -> None:
    """Lags of neighbours, of the two halves of a Box-Muller pair, and of blocks: 2.2 in ten million over all lags."""
    values = flat(make(name), "gradient", 0, 2**19, 2**18 + 3).double()
    for lag in (1, 2, 15, 16, 511, 512, 513, 1024, 2**13, 2**16, 2**18):
        assert uncorrelated(values[:-lag], values[lag:]), lag


def test_no_number_comes_twice(source: NoiseSource) -> None:
    """Runs of four numbers from the beginnings of all chunks, of all streams and steps, as they are, with the other sign,
    and backwards: no two are equal."""
    normals = torch.stack([flat(source, stream, step, 2**19) for stream in STREAMS for step in range(2)])
    rows = normals.view(-1, 2**9)[:, :4].contiguous()
    seen = [row.tobytes() for way in (rows, -rows, rows.flip(1)) for row in way.numpy()]
    assert len(set(seen)) == len(seen)


def test_the_number_of_threads_decides_nothing(source: NoiseSource, threads: Callable[[int], None]) -> None:
    values = [torch.zeros(2**19), torch.zeros(5), torch.zeros(2**18)]
    drawn = []
    for count in (1, 2, 5):
        threads(count)
        drawn.append(torch.cat(source.release("gradient", 4, values, [1.0, 2.0, 3.0])))
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])


def test_asked_again_it_repeats_itself_until_it_has_forgotten(source: NoiseSource) -> None:
    """A seed cannot be forgotten; keys of the operating system can."""
    seeded = source.name == "seeded"
    for stream in ("gradient", "statistic"):
        one, again = (source.release(stream, 1, [torch.zeros(50)], [1.0])[0] for _ in range(2))
        assert torch.equal(one, again)
    later = source.release("gradient", 4, [torch.zeros(50)], [1.0])[0]
    assert source.sample_key(3) == source.sample_key(3) != source.sample_key(4)
    source.forget_steps(4)
    source.forget_draws(4)
    assert torch.equal(source.release("gradient", 4, [torch.zeros(50)], [1.0])[0], later)
    for ask in (lambda: source.release("gradient", 3, [torch.zeros(50)], [1.0]), lambda: source.sample_key(3)):
        if seeded:
            ask()
        else:
            with pytest.raises(clipless.errors.Misuse, match="the key of place 3 is gone"):
                ask()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_release_leaves_its_values_alone_and_lies_elsewhere(source: NoiseSource, dtype: torch.dtype) -> None:
    """Several blocks, some across tensors. Noise of 0.01 shows the value under it; the odds of 7.5 standard deviations in
    800,000 numbers are 5e-8."""
    values = [torch.arange(size, dtype=dtype) % 97 for size in (2**18 + 3, 5, 2**19)]
    before = [value.clone() for value in values]
    released = list(source.release("gradient", 3, values, [1e-2] * 3))
    assert {one.data_ptr() for one in released}.isdisjoint(value.data_ptr() for value in values)
    for one, value, old in zip(released, values, before, strict=True):
        assert torch.equal(value, old)
        assert 0 < float((one - value).abs().max()) < 7.5e-2


# Shapes and types.


@pytest.mark.parametrize("shape", [(), (1,), (15,), (16,), (17,), (3, 0, 2), (4, 5, 6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_releases_are_shaped_like_their_values(source: NoiseSource, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    templates = [
        torch.ones(shape, dtype=dtype),
        torch.ones(shape, dtype=dtype).t() if len(shape) == 2 else torch.ones(2),
    ]
    one, other = source.release("gradient", 0, templates, [1.0, 2.0])
    assert (one.shape, other.shape) == (templates[0].shape, templates[1].shape)
    assert one.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(torch.equal(template, torch.ones_like(template)) for template in templates)


def test_a_release_is_the_value_plus_noise_of_its_own_size(source: NoiseSource) -> None:
    """4 comparisons of means and deviations at RARE each. A transposed value keeps its places."""
    values = [torch.full((500, 400), 1000.0), torch.arange(200_000.0).view(400, 500).t() * 100]
    stddevs = [0.25, 7.0]
    bound = stats.norm.isf(RARE / 2)
    for value, stddev, noisy in zip(values, stddevs, source.release("gradient", 0, values, stddevs), strict=True):
        noise = (noisy - value).double() / stddev
        assert abs(float(noise.mean())) < bound / math.sqrt(noise.numel())
        assert abs(float(noise.square().mean()) - 1) < bound * math.sqrt(2 / noise.numel()) + 1e-4


def test_a_value_with_gaps_in_memory_is_released_in_its_shape(source: NoiseSource) -> None:
    place = torch.zeros(4, 6).t()
    (released,) = source.release("gradient", 0, [place], [1.0])
    assert released.shape == place.shape
    assert (released != 0).any()
    assert (place == 0).all()


@pytest.mark.parametrize("stddev", [0.0, -1.0, 1e-31, 1e-60, math.inf, math.nan])
def test_noise_that_hides_nothing_is_refused(source: NoiseSource, stddev: float) -> None:
    with pytest.raises(InvalidArgument, match="must be finite and at least 1e-30. Raise the clipping threshold"):
        list(source.release("gradient", 0, [torch.ones(3), torch.ones(3)], [1.0, stddev]))


@pytest.mark.parametrize(("stddev", "divisor"), [(1e-28, 1e3), (1e-31, 1e-3), (1e300, 1e-300)])
def test_noise_that_hides_nothing_once_it_is_divided_is_refused(
    source: NoiseSource, stddev: float, divisor: float
) -> None:
    """Nor any that hides nothing before: what is added and what is released both have to hide."""
    source.release("gradient", 0, [torch.ones(3)], [1e-26], 1e3)
    with pytest.raises(InvalidArgument, match="must be finite and at least 1e-30"):
        source.release("gradient", 0, [torch.ones(3), torch.ones(3)], [1.0, stddev], divisor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_least_noise_is_all_there(source: NoiseSource, dtype: torch.dtype) -> None:
    """Of 1000 numbers none is lost to underflow, and their size is right to 5 sigma."""
    (released,) = source.release("gradient", 0, [torch.zeros(1000, dtype=dtype)], [1e-30])
    assert (released != 0).sum() > 950, "all but what lies on the grid's zero"
    assert released.double().square().mean().sqrt().item() == pytest.approx(1e-30, rel=5 / math.sqrt(2000))


def test_a_value_without_its_deviation_is_refused(source: NoiseSource) -> None:
    with pytest.raises(ValueError, match="shorter|longer"):
        list(source.release("gradient", 0, [torch.ones(3), torch.ones(3)], [1.0]))


def test_an_unknown_stream_is_refused(source: NoiseSource) -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'gradient'"):
        source.release("gradeint", 0, [torch.ones(3)], [1.0])


def test_the_global_generators_are_neither_read_nor_moved(source: NoiseSource) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    PoissonSampler(source, 1000, 0.1).indices(0)
    list(source.release("gradient", 0, [torch.zeros(5)], [1.0]))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


# Threads.


def test_torch_computes_as_before_beside_releases(source: NoiseSource, threads: Callable[[int], None]) -> None:
    """They share OpenMP's threads."""
    threads(2)
    a = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    product, curve = a @ a, a.exp()
    for _ in range(6):
        source.release("gradient", 0, [torch.zeros(2**20 + 1)], [1.0])
        assert torch.equal(a @ a, product)
        assert torch.equal(a.exp(), curve)


# Tensors that are not in main memory. Torch's "meta" device stands for them where no number is needed.


def test_on_other_devices_noise_is_made_here_and_copied() -> None:
    source = noise_source("seeded", 3)
    (there,) = source.release("gradient", 0, [Elsewhere(torch.ones(5))], [1.0])
    (here,) = source.release("gradient", 0, [torch.ones(5)], [1.0])
    assert torch.equal(there.as_subclass(Tensor), here)


class Elsewhere(Tensor):
    """A tensor in main memory that says it is not."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def detach(self) -> "Elsewhere":
        return super().detach().as_subclass(Elsewhere)


@pytest.mark.parametrize("seed", [None, 3])
def test_torchs_generator_there_is_used_only_if_asked_for_by_name(seed: int | None) -> None:
    """Each tensor, stream and step has noise of its own, off the grid; tensors in main memory are as ever."""
    source = noise_source("device", seed)
    values = [Elsewhere(torch.zeros(1000)), torch.zeros(1000), Elsewhere(torch.zeros(1000))]
    drawn = [
        one.as_subclass(Tensor).double()
        for stream, step in (("gradient", 0), ("gradient", 1), ("statistic", 0))
        for one in source.release(stream, step, values, [1.0, 1.0, 1.0])
    ]
    large = torch.stack(drawn)
    assert ((torch.corrcoef(large) - torch.eye(9)).abs() < 0.16).all()  # five standard deviations
    assert ((large.std(1) - 1).abs() < 0.12).all()
    on_grid = [bool(torch.equal(one * 64, (one * 64).round())) for one in drawn]
    assert on_grid == [False, True, False] * 3
    again = source.release("statistic", 0, values, [1.0, 1.0, 1.0])
    assert torch.equal(again[2].as_subclass(Tensor).double(), drawn[-1])


def test_shards_that_lie_elsewhere_have_noise_of_their_own() -> None:
    """Drawn there by two ranks, under one key: each shard's place in the whole decides. Five standard deviations."""
    sources = [noise_source("device", 3) for _ in range(2)]
    drawn = [
        source.release("gradient", 0, [Elsewhere(torch.zeros(1000))], [1.0], places=[place])[0].as_subclass(Tensor)
        for source, place in zip(sources, (0, 1000), strict=True)
    ]
    assert abs(float(torch.corrcoef(torch.stack(drawn))[0, 1])) < 0.16


# Parameters without a dimension.


@pytest.mark.parametrize("source", ["secure", "seeded"])
def test_a_parameter_without_dimensions_is_noised(source: str) -> None:
    """One is used, with a gradient of 0, and one is not: what is released of either is noise of the planned size."""

    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.used = nn.Linear(2, 2), nn.Parameter(torch.ones(()))
            self.unused = nn.Parameter(torch.zeros(()))
            nn.init.zeros_(self.inner.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.used

    model, steps, batch = Tempered(), 200, 3
    seed = {"seed": 3} if source == "seeded" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = TensorDataset(torch.zeros(6, 2), torch.zeros(6, dtype=torch.int64))
    private = clipless.make_private(
        model, optimizer, data, noise_multiplier=2.0, delta=1e-3, batch_size=batch, steps=steps,
        clipping=clipless.abadi(threshold=0.5), noise=source, accountant="rdp", **{"loss_reduction": "mean", **seed}
    )  # fmt: skip
    seen = []
    for step, (x, y) in enumerate(private.loader):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seen.append([float(model.used.grad), float(model.unused.grad)])
        optimizer.zero_grad()
        if source == "seeded":
            drawn = seeded_normals(3, "gradient", step, model.parameters())
            noise = dict(zip(dict(model.named_parameters()), drawn, strict=True))["unused"]
            stddev = 2.0 * 0.5 * (1 + RESERVE)
            assert_on_grid(torch.tensor(seen[-1][1]), stddev * noise, stddev, 1e-9, divisor=batch)
    private.detach()
    for column in zip(*seen, strict=True):
        size = math.sqrt(sum(value**2 for value in column) / steps) * batch
        assert size == pytest.approx(2.0 * 0.5, rel=0.3)  # six standard deviations
