"""The noise that is released: its size, its independence, and that nothing of the data decides over it.

Statistical bounds are in standard deviations of what a correct program gives; about how often a random seed would give a
false alarm is stated, and the seeds are fixed.
"""

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from allocations import effective_multiplier
from clipless import Private
from clipless.noise import STREAMS
from clipless.noise.adding import grid
from clipless.noise.keys import SeededKeys
from clipless.noise.normals import standard_normals
from clipless.plan import RESERVE, noise_stddevs

DRAWS = 500
SIZE, BATCH, MULTIPLIER = 12, 3, 1.7


class Model(nn.Module):
    """One layer that is used and two that are not, 116 coordinates in all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.wide, self.deep = nn.Linear(1, 4), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Setting(NamedTuple):
    """A way to clip, and the standard deviation of the noise on each parameter's sum that the definition asks for."""

    clipping: Any
    stddevs: dict[str, float]


LAYERS = {"used": 0.5, "wide": 1.0, "deep": 2.0}
NAMES = [f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")]
PARAMETERS = dict(zip(NAMES, (0.1, 0.2, 0.5, 1.0, 2.0, 4.0), strict=True))
BLOCKS = {"weight": 3.0, "bias": 0.3}


def uniform(thresholds: dict[str, float]) -> float:
    """z times the length of the threshold vector, the same for every coordinate."""
    return MULTIPLIER * math.hypot(*thresholds.values())


def equal_budget(thresholds: dict[str, float], group: str) -> float:
    """z times the group's threshold times the root of the number of groups."""
    return MULTIPLIER * math.sqrt(len(thresholds)) * thresholds[group]


def clipped(thresholds: dict[str, float], groups: Any, allocation: str) -> Any:
    return clipless.abadi(threshold=list(thresholds.values()), groups=groups, allocation=allocation)


SETTINGS = {
    "flat": Setting(clipless.abadi(threshold=2.0), dict.fromkeys(NAMES, 2.0 * MULTIPLIER)),
    "flat, auto-s": Setting("auto-s", dict.fromkeys(NAMES, MULTIPLIER)),
    "shared out": Setting(clipless.auto_s(threshold=2.0, groups="per-layer"), dict.fromkeys(NAMES, 2.0 * MULTIPLIER)),
    "per-layer": Setting(clipped(LAYERS, "per-layer", "uniform"), dict.fromkeys(NAMES, uniform(LAYERS))),
    "per-layer, equal budget": Setting(
        clipped(LAYERS, "per-layer", "equal-budget"),
        {name: equal_budget(LAYERS, name.split(".")[0]) for name in NAMES},
    ),
    "per-parameter": Setting(
        clipped(PARAMETERS, "per-parameter", "uniform"), dict.fromkeys(NAMES, uniform(PARAMETERS))
    ),
    "per-parameter, equal budget": Setting(
        clipped(PARAMETERS, "per-parameter", "equal-budget"), {name: equal_budget(PARAMETERS, name) for name in NAMES}
    ),
    "blocks": Setting(clipped(BLOCKS, [["*.weight"], ["*.bias"]], "uniform"), dict.fromkeys(NAMES, uniform(BLOCKS))),
    "blocks, equal budget": Setting(
        clipped(BLOCKS, [["*.weight"], ["*.bias"]], "equal-budget"),
        {name: equal_budget(BLOCKS, name.split(".")[1]) for name in NAMES},
    ),
}


def attach(model: nn.Module, data: Tensor | None = None, lr: float = 0.0, **changes: Any) -> tuple[Any, Private]:
    settings = {"noise_multiplier": MULTIPLIER, "delta": 1e-5, "batch_size": BATCH, "steps": DRAWS}
    settings |= {"seed": 2, "accountant": "gdp"}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    records = TensorDataset(torch.ones(SIZE, 1) if data is None else data)
    return optimizer, clipless.make_private(
        model, optimizer, records, **{"loss_reduction": "mean"} | settings | changes
    )


def released(count: int, weight: float = 0.0, **changes: Any) -> tuple[list[int], list[dict[str, Tensor]]]:
    """Rows and released gradients of the first steps of a run; a weight of 0 makes every record's gradient zero."""
    model = Model()
    optimizer, private = attach(model, **changes)
    rows, gradients = [], []
    for (x,) in itertools.islice(private.loader, count):
        (weight * model(x).mean()).backward()
        optimizer.step()
        rows.append(len(x))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    private.detach()
    return rows, gradients


class Sample(NamedTuple):
    """500 releases of every coordinate, what their standard deviation should be, and the rows of each batch."""

    setting: Setting
    values: Tensor
    expected: Tensor
    rows: Tensor


# Thresholds of any partition come to one size of noise on all coordinates, or to one for each group: that the plan has the
# sizes of every setting is tested below, and here that noise has the sizes of the plan.
SAMPLED = ["flat", "per-layer", "blocks, equal budget"]


@pytest.fixture(scope="module", params=SAMPLED)
def sample(request: pytest.FixtureRequest) -> Sample:
    setting = SETTINGS[request.param]
    rows, gradients = released(DRAWS, clipping=setting.clipping)
    values = torch.stack([torch.cat([step[name].flatten() for name in NAMES]) for step in gradients]).double()
    expected = torch.cat(
        [torch.full((gradients[0][name].numel(),), setting.stddevs[name] / BATCH) for name in NAMES]
    ).double()
    return Sample(setting, values, expected, torch.tensor(rows))


def test_noise_has_the_planned_size_in_every_group(sample: Sample) -> None:
    """Within 5 % for each threshold's group, and 6 sigma for each of 116 coordinates (about 1 in 4 million)."""
    deviations = sample.values.square().mean(0).sqrt() / sample.expected
    counts = [p.numel() for p in Model().parameters()]
    for name, part in zip(NAMES, deviations.split(counts), strict=True):
        assert part.square().mean().sqrt().item() == pytest.approx(1.0, rel=0.05), name
    assert (deviations - 1).abs().max() < 6 / math.sqrt(2 * DRAWS)


def test_noise_has_mean_zero(sample: Sample) -> None:
    """5 sigma for each of 116 coordinates and for all together: 1 seed in 15,000."""
    normal = sample.values / sample.expected
    assert normal.mean(0).abs().max() < 5 / math.sqrt(DRAWS)
    assert normal.mean().abs() < 5 / math.sqrt(normal.numel())


def test_noise_is_gaussian(sample: Sample) -> None:
    """Kolmogorov-Smirnov over 58,000 numbers, at one in a million. What the grid has rounded off is put back at random."""
    steps = torch.tensor([grid(stddev * BATCH) / BATCH for stddev in sample.expected.tolist()])
    spread = (torch.rand(sample.values.shape, generator=torch.Generator().manual_seed(0)) - 0.5) * steps
    assert stats.kstest(((sample.values + spread) / sample.expected).flatten().numpy(), "norm").pvalue > 1e-6


def test_coordinates_are_uncorrelated(sample: Sample) -> None:
    """6 sigma for each of 6,670 pairs: 1 seed in 70,000."""
    correlations = torch.corrcoef(sample.values.T) - torch.eye(len(sample.expected))
    assert correlations.abs().max() < 6 / math.sqrt(DRAWS)


@pytest.mark.parametrize("lag", [1, 2, 10])
def test_steps_are_uncorrelated(sample: Sample, lag: int) -> None:
    """5 sigma for each of 116 coordinates and for all together: 1 seed in 15,000."""
    normal = sample.values / sample.expected
    products = normal[lag:] * normal[:-lag]
    assert products.mean(0).abs().max() < 5 / math.sqrt(len(products))
    assert products.mean().abs() < 5 / math.sqrt(products.numel())


def test_no_two_steps_share_their_noise(sample: Sample) -> None:
    """No direction is used twice, be it with the other sign."""
    directions = torch.nn.functional.normalize(sample.values / sample.expected, dim=1)
    cosines = directions @ directions.T - torch.eye(DRAWS)
    assert cosines.abs().max() < 0.99


def test_large_batches_are_not_noisier_than_small_ones(sample: Sample) -> None:
    """5 sigma for the difference of two variances, 6 seeds in ten million."""
    normal = sample.values / sample.expected
    small, large = normal[sample.rows < BATCH], normal[sample.rows > BATCH]
    assert min(len(small), len(large)) > DRAWS / 4
    bound = 5 * math.sqrt(2 / small.numel() + 2 / large.numel())
    assert abs(small.square().mean() - large.square().mean()) < bound


# What the noise does not depend on: the same seed gives the same bits.

UNUSED = NAMES[2:]

CIRCUMSTANCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gradients or none": ({"weight": 0.0}, {"weight": 1.0}),
    "small or large gradients": ({"weight": 1e-6}, {"weight": 1e6}),
    "one outlier": ({"weight": 1.0}, {"weight": 1.0, "data": torch.ones(SIZE, 1).index_fill(0, torch.tensor(0), 1e9)}),
    "not a number": ({"weight": 1.0}, {"weight": 1.0, "data": torch.full((SIZE, 1), math.nan)}),
    "few or many records": ({"weight": 1.0, "data": torch.ones(3, 1)}, {"weight": 1.0, "data": torch.ones(300, 1)}),
    "sum or mean": ({"weight": 1.0}, {"weight": 1.0, "loss_reduction": "sum"}),
    "rule": ({"clipping": "auto-s"}, {"clipping": "auto-v"}),
    "number of steps planned": ({"steps": 10}, {"steps": 1000}),
    "learning rate": ({"lr": 0.0}, {"lr": 0.5}),
    "accountant": ({"accountant": "gdp"}, {"accountant": "rdp"}),
}


@pytest.mark.parametrize("circumstances", CIRCUMSTANCES.values(), ids=CIRCUMSTANCES)
def test_nothing_but_the_seed_and_the_plan_decides_over_the_noise(
    circumstances: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """Not the batch, its size, its largest gradient, nor the records, decide over scale or bits."""
    (rows, one), (other_rows, other) = (released(8, **changes) for changes in circumstances)
    assert len(one) == len(other) == 8
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in UNUSED)
    if "data" in circumstances[0]:
        assert rows != other_rows, "the realised batches must differ for the test to mean anything"


def test_the_release_is_divided_by_the_expected_batch() -> None:
    one, other = (released(8, batch_size=batch)[1] for batch in (2, 6))
    for a, b in zip(one, other, strict=True):
        for name in NAMES:
            torch.testing.assert_close(2 * a[name], 6 * b[name], rtol=0, atol=MULTIPLIER / 64)


def test_the_noise_is_proportional_to_multiplier_and_threshold() -> None:
    one = released(4, noise_multiplier=1.0, clipping=clipless.abadi(threshold=1.0))[1]
    other = released(4, noise_multiplier=3.0, clipping=clipless.abadi(threshold=0.5))[1]
    for a, b in zip(one, other, strict=True):
        for name in NAMES:
            torch.testing.assert_close(1.5 * a[name], b[name], rtol=0, atol=1.5 / 3 / 64)


def test_parameters_of_one_shape_do_not_share_their_noise() -> None:
    model = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
    model.append(used := nn.Linear(1, 1))
    _, private = attach(model)
    private.step(lambda model, batch: used(batch[0]).sum(1), next(iter(private.loader)))
    noises = [layer.weight.grad for layer in model[:4]]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(noises, 2))


def test_a_resumed_run_does_not_repeat_noise_that_was_released() -> None:
    model = Model()
    optimizer, private = attach(model, steps=10)

    def take(steps: int) -> list[Tensor]:
        taken = []
        for (x,) in itertools.islice(private.loader, steps):
            model(x).mean().backward()
            optimizer.step()
            taken.append(model.wide.weight.grad.clone())
        return taken

    first = take(4)
    state = private.state_dict()
    private.detach()
    optimizer, private = attach(model, steps=10, seed=99)
    private.load_state_dict(state)
    noises = first + take(6)
    assert len(noises) == 10
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(noises, 2))


# The plan's arithmetic.


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30),
    st.floats(1e-3, 1e3),
    st.sampled_from(["uniform", "equal-budget"]),
)
def test_whatever_the_thresholds_a_step_is_worth_its_multiplier(
    thresholds: list[float], multiplier: float, allocation: str
) -> None:
    """(Σ (R_g/s_g)²)^(-1/2), written out here once more, is z under both allocations, and the reserve for rounding."""
    column = torch.tensor(thresholds, dtype=torch.float64).unsqueeze(1)
    stddevs = noise_stddevs(column, multiplier, allocation)
    assert stddevs.shape == column.shape
    worth = sum((r / s) ** 2 for r, s in zip(thresholds, stddevs.flatten().tolist(), strict=True)) ** -0.5
    assert worth == pytest.approx(multiplier * (1 + RESERVE), rel=1e-9)
    assert effective_multiplier(column, stddevs) == pytest.approx(multiplier * (1 + RESERVE), rel=1e-9)
    if allocation == "uniform":
        assert stddevs.unique().numel() == 1


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_the_ledger_is_told_the_multiplier_that_the_noise_is_worth(setting: Setting) -> None:
    """The layerwise trap: noise of σ·R_g on each of G groups would be worth σ/√G only."""
    model = Model()
    optimizer, private = attach(model, clipping=setting.clipping)
    (x,) = next(iter(private.loader))
    model(x).mean().backward()
    optimizer.step()
    ((event, _),) = private.ledger.events
    stddevs = private.plan.stddevs(0, private.thresholds)
    assert effective_multiplier(private.thresholds, stddevs) == pytest.approx(MULTIPLIER * (1 + RESERVE), rel=1e-6)
    assert event.noise_multiplier == private.plan.noise_multiplier == MULTIPLIER
    by_group = [setting.stddevs[members[0]] * (1 + RESERVE) for members in private.plan.groups.members]
    assert stddevs.flatten().tolist() == pytest.approx(by_group, rel=1e-6)


# The keys of a seed.


def first(seed: int, stream: str = "gradient", step: int = 0) -> Tensor:
    return torch.from_numpy(standard_normals(SeededKeys(seed).key(stream, step), 20))


def test_noise_is_a_function_of_seed_stream_and_step() -> None:
    places = list(itertools.product(STREAMS, range(50)))
    noises = [first(5, *place) for place in places]
    assert all(torch.equal(noise, first(5, *place)) for noise, place in zip(noises, places, strict=True))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(noises, 2))


SEEDS = st.integers(0, 2**128 - 1)


@given(st.tuples(SEEDS, st.sampled_from(sorted(STREAMS)), st.integers(0, 10**9)), st.data())
def test_other_seeds_streams_and_steps_give_other_noise(one: tuple[int, str, int], data: st.DataObject) -> None:
    seed, stream, step = one
    other = data.draw(
        st.sampled_from(
            [
                (seed ^ (1 << data.draw(st.integers(0, 127), label="bit of the seed")), stream, step),
                (seed, data.draw(st.sampled_from(sorted(STREAMS)), label="stream"), step),
                (seed, stream, data.draw(st.integers(0, 10**9), label="step")),
                (step, stream, seed % 10**9),
            ]
        )
    )
    assume(other != one)
    assert not torch.equal(first(*one), first(*other))
