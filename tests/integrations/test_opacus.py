"""clipless' clipping inside an Opacus run: clipped sums, noise and epsilon."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import clipless
from clipless.accounting import joint_multiplier
from clipless.clipping import CLIPPINGS
from clipless.integrations.opacus import ClippedOptimizer, clip_with
from clipless.plan import RESERVE, noise_stddevs

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Optimal order is the"),
]
RECORDS, BATCH = 64, 16


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    )


def data_of(count: int = RECORDS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(count, 2, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def opacus_run(
    clipping: Any, noise: float = 1.0, accountant: str = "rdp", poisson: bool = False, **options: Any
) -> tuple[Any, Any, Any, PrivacyEngine]:
    """A run by Opacus with our clipping: module, optimizer, loader and engine."""
    model = model_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = PrivacyEngine(accountant=accountant)
        module, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*data_of()), batch_size=BATCH),
            noise_multiplier=noise,
            max_grad_norm=1.0,
            poisson_sampling=poisson,
            noise_generator=torch.Generator().manual_seed(9),
        )
    return module, clip_with(optimizer, module, clipping, **options), loader, engine


def backward(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(module(x), y).backward()


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def options_of(name: str) -> dict[str, int]:
    return {"steps": 10} if name == "decay" else {}


def sums(optimizer: Any) -> list[Tensor]:
    optimizer.clip_and_accumulate()
    return [p.summed_grad for p in optimizer.params]


@pytest.mark.parametrize("groups", ["flat", "per-layer", "per-parameter"])
@pytest.mark.parametrize("name", CLIPPINGS)
def test_clipped_sums_are_those_of_the_engine_and_of_single_records(name: str, groups: str) -> None:
    clipping = CLIPPINGS[name](groups=groups)  # type: ignore[call-arg]
    module, optimizer, _, _ = opacus_run(clipping, **options_of(name))
    batch = data_of(BATCH)
    backward(module, optimizer, *batch)
    found, plain = sums(optimizer), model_of()
    for reference in (clipless.clipped_sum, clipless.oracle.clipped_sum):
        expected = reference(plain, losses, batch, clipping=clipping).grads
        for value, (parameter, _) in zip(found, plain.named_parameters(), strict=True):
            assert torch.allclose(value, expected[parameter], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("groups", ["flat", "per-layer"])
@pytest.mark.parametrize("name", CLIPPINGS)
def test_removing_a_record_moves_the_sum_by_at_most_the_sensitivity(name: str, groups: str) -> None:
    x, y = data_of(BATCH)
    x[0] *= 1e4
    whole = []
    for kept in (slice(None), slice(1, None)):
        module, optimizer, _, _ = opacus_run(CLIPPINGS[name](groups=groups), **options_of(name))  # type: ignore[call-arg]
        backward(module, optimizer, x[kept], y[kept])
        whole.append(torch.cat([value.flatten() for value in sums(optimizer)]))
    assert float((whole[0] - whole[1]).norm()) <= optimizer.max_grad_norm * (1 + 1e-5)


def sum_of_many(dtype: torch.dtype, parts: int, left_out: int | None) -> Tensor:
    """The clipped sum of 8,000 similar gradients, all of which point the same way."""
    torch.manual_seed(0)
    model = nn.Linear(64, 8, bias=False).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, optimizer, _ = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.ones(8_000, 64)), batch_size=125),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
    clipped = clip_with(optimizer, module, clipless.abadi())
    gradients = (1 + 0.1 * torch.randn(8_000, 8, 64, generator=torch.Generator().manual_seed(1))).to(dtype)
    for part in gradients[torch.arange(8_000) != (8_000 if left_out is None else left_out)].split(8_000 // parts):
        clipped.params[0].grad_sample = part
        clipped.clip_and_accumulate()
    total: Tensor = clipped._sum(clipped.params[0])
    assert torch.allclose(total.float(), clipped.params[0].summed_grad, rtol=1e-6)
    clipped.add_noise()
    assert clipped.params[0].grad.dtype is dtype
    return total


@pytest.mark.parametrize("parts", [64, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_record_moves_the_sum_of_many_by_at_most_the_sensitivity(dtype: torch.dtype, parts: int) -> None:
    """Added up in the type of the parameters, in 64 parts, it moves it by 32 in bfloat16 and by 4.2 in float16."""
    whole = sum_of_many(dtype, parts, None)
    moved = [float((whole - sum_of_many(dtype, parts, left_out)).norm()) for left_out in (0, 4_000, 7_999)]
    assert max(moved) <= 1 + 1e-9


def test_what_is_released_is_the_exact_sum_and_noise() -> None:
    """Two parts whose float32 sum loses the second one."""
    module, optimizer, _, _ = opacus_run(clipless.abadi(threshold=1e9))
    for parameter in optimizer.params:
        parameter.grad_sample = torch.full((1, *parameter.shape), 2.0**24)
    optimizer.clip_and_accumulate()
    for parameter in optimizer.params:
        parameter.grad_sample = torch.ones(1, *parameter.shape)
    optimizer.clip_and_accumulate()
    for parameter in optimizer.params:
        assert bool((optimizer._sum(parameter) == 2.0**24 + 1).all())
        assert bool((parameter.summed_grad == 2.0**24).all())
    optimizer.zero_grad()
    backward(module, optimizer, *data_of(BATCH))
    again = sums(optimizer)
    for parameter, value in zip(optimizer.params, again, strict=True):
        assert torch.allclose(optimizer._sum(parameter).float(), value)


@pytest.mark.parametrize("allocation", ["uniform", "equal-budget"])
@pytest.mark.parametrize("name", ["auto-s", "abadi", "dc-p", "dc-e", "quantile"])
def test_noise_is_the_multiplier_times_the_sensitivity(name: str, allocation: str) -> None:
    """An empty sum with noise, 300 times: standard deviations within 4.5 standard errors of the plan's, which a correct
    build misses once in 10,000 tests."""
    clipping = CLIPPINGS[name](groups="per-layer", allocation=allocation)  # type: ignore[call-arg]
    _, optimizer, _, _ = opacus_run(clipping, noise=1.5)
    thresholds, statistics = optimizer.thresholds, []
    values: list[list[Tensor]] = [[] for _ in optimizer.params]
    for _ in range(300):
        for parameter in optimizer.params:
            parameter.summed_grad = torch.zeros_like(parameter)
        optimizer._statistic = optimizer.clipping.policy.observe(optimizer._state, torch.zeros(len(thresholds), 0))
        optimizer.add_noise()
        for kept, parameter in zip(values, optimizer.params, strict=True):
            kept.append(parameter.grad.flatten())
        if optimizer._released is not None:
            statistics.append(optimizer._released.flatten())
    _, gradient, statistic = optimizer._multipliers()
    assert (statistic is None) == (not statistics)
    assert joint_multiplier(gradient, *([] if statistic is None else [statistic])) == pytest.approx(1.5)
    assert (gradient == 1.5) == (statistic is None)
    wanted = noise_stddevs(thresholds, gradient, allocation).flatten().tolist()
    for kept, group in zip(values, optimizer._group_of, strict=True):
        _close(torch.cat(kept), wanted[group])
    if statistic is not None:
        _close(torch.cat(statistics), statistic)


def _close(values: Tensor, stddev: float) -> None:
    error = stddev / math.sqrt(2 * len(values))
    assert abs(float(values.double().std()) - stddev) < 4.5 * error


@pytest.mark.parametrize("name", ["auto-s", "dc-p", "dc-e", "quantile"])
def test_the_accountant_is_told_the_whole_step(name: str) -> None:
    module, optimizer, loader, engine = opacus_run(name, noise=1.3, poisson=True)
    for x, y in loader:
        backward(module, optimizer, x, y)
        optimizer.step()
    (history,) = engine.accountant.history
    assert history == (1.3, 1 / len(loader), len(loader))
    ours = clipless.epsilon(1.3, 1 / len(loader), len(loader), 1e-3, accountant="rdp")
    assert engine.get_epsilon(1e-3) == pytest.approx(ours, rel=0.02)


def test_a_policy_learns_from_what_was_released_and_thresholds_are_kept_in_checkpoints() -> None:
    module, optimizer, loader, _ = opacus_run("dc-p", poisson=True)
    before = optimizer.thresholds
    for x, y in loader:
        backward(module, optimizer, x, y)
        optimizer.step()
    assert not torch.equal(optimizer.thresholds, before)
    assert optimizer.max_grad_norm == pytest.approx(float(optimizer.thresholds))
    saved = copy.deepcopy(optimizer.state_dict())
    _, fresh, _, _ = opacus_run("dc-p")
    fresh.load_state_dict(saved)
    assert torch.equal(fresh.thresholds, optimizer.thresholds)
    del saved["clipless"]
    with pytest.raises(clipless.InvalidArgument, match="no thresholds"):
        fresh.load_state_dict(saved)


def test_noise_has_the_threshold_before_the_step() -> None:
    """A threshold that was learned from a batch must not scale the noise of the same batch."""
    module, optimizer, _, _ = opacus_run("quantile", noise=2.0)
    seen = []
    original = optimizer._noise
    optimizer._noise = lambda stddev, like: seen.append(stddev) or original(stddev, like)
    for _ in range(3):
        before, seen[:] = float(optimizer.thresholds), []
        gradient = optimizer._multipliers()[1]
        backward(module, optimizer, *data_of(BATCH))
        optimizer.step()
        assert seen[0] == pytest.approx(gradient * before * (1 + RESERVE))


def test_virtual_batches_are_one_batch() -> None:
    """Parts of a logical batch, by BatchMemoryManager: the same sums, one statistic, one event."""
    found = []
    for physical in (BATCH, 3):
        module, optimizer, loader, engine = opacus_run("dc-p", noise=1.0)
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer) as parts:
            for x, y in parts:
                backward(module, optimizer, x, y)
                optimizer.step()
        found.append((torch.cat([p.flatten() for p in module.parameters()]), optimizer.thresholds))
        assert engine.accountant.history == [(1.0, 1 / len(loader), len(loader))]
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5)


def test_a_broken_record_adds_nothing() -> None:
    module, optimizer, _, _ = opacus_run("auto-s")
    x, y = data_of(BATCH)
    x[3] = torch.inf
    backward(module, optimizer, x, y)
    broken = [value.clone() for value in sums(optimizer)]
    backward(module, optimizer, torch.cat([x[:3], x[4:]]), torch.cat([y[:3], y[4:]]))
    for one, other in zip(broken, sums(optimizer), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_an_empty_batch_is_noise_and_a_statistic() -> None:
    module, optimizer, _, engine = opacus_run("dc-p")
    x, y = data_of(0)
    backward(module, optimizer, x, y)
    optimizer.step()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in optimizer.params)
    assert engine.accountant.history[0][2] == 1


@pytest.mark.parametrize(
    "options", [{"clipping": "per_layer"}, {"grad_sample_mode": "ghost"}, {"clipping": "adaptive"}]
)
def test_optimizers_that_clip_elsewhere_are_refused(options: dict[str, Any]) -> None:
    model, adaptive = model_of(), {}
    if options.get("clipping") == "adaptive":
        adaptive = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 10.0}
        adaptive |= {"min_clipbound": 0.1, "unclipped_num_std": 3.0}
    bound: Any = [1.0] * len(list(model.parameters())) if options.get("clipping") == "per_layer" else 1.0
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*data_of()), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=bound,
        **options,
        **adaptive,
    )
    with pytest.raises(clipless.InvalidType, match="hooks"):
        clip_with(made[1], model, "auto-s")


def test_what_cannot_be_accounted_for_is_refused() -> None:
    with pytest.raises(clipless.InvalidArgument, match="steps="):
        opacus_run("decay")
    with pytest.raises(clipless.InvalidArgument, match="noise_rho"):
        opacus_run(clipless.decay(noise_rho=0.5), steps=10)
    with pytest.raises(clipless.InvalidType, match="schedule"):
        opacus_run(clipless.schedule([(0.5, "abadi"), (0.5, "global")]))
    with pytest.raises(clipless.InvalidArgument, match="takes more than the whole step"):
        opacus_run(clipless.dc_p(histogram_multiplier=0.5), noise=1.0)
    _, optimizer, _, _ = opacus_run("auto-s")
    with pytest.raises(clipless.Misuse, match="thresholds"):
        optimizer.max_grad_norm = 0.1
    with pytest.raises(clipless.InvalidType):
        clip_with(optimizer, model_of(), "auto-s")
    assert isinstance(optimizer, ClippedOptimizer)
    from opacus.optimizers import DPOptimizer

    bare = DPOptimizer(optimizer.original_optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=BATCH)
    with pytest.raises(clipless.Misuse, match="accountant"):
        clip_with(bare, model_of(), "auto-s")
