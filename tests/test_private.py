"""make_private and Private: every point of the contract, on loops as a user would write them."""

import contextlib
import copy
import gc
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset, default_collate

import children
import clipless
from clipless import BudgetSpent, InvalidArgument, Misuse, Private, oracle
from noising import assert_on_grid, seeded_normals

FEATURES, CLASSES = 5, 3
SIZE, BATCH = 60, 12

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.1),
    "amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "fused adam": partial(torch.optim.Adam, lr=0.1, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "adamax": partial(torch.optim.Adamax, lr=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.1),
    "radam": partial(torch.optim.RAdam, lr=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "asgd": partial(torch.optim.ASGD, lr=0.1),
    "rprop": partial(torch.optim.Rprop, lr=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
}


def dataset(size: int = SIZE, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, FEATURES, generator=generator).to(dtype)
    return TensorDataset(x, torch.randint(CLASSES, (size,), generator=generator))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))


class WithUnused(nn.Module):
    """A layer that the forward pass never calls."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(FEATURES, CLASSES), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def attach(model: nn.Module, optimizer: Optimizer, data: Any = None, **changes: Any) -> Private:
    """make_private with small defaults; an argument of None takes the default away."""
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": BATCH, "steps": 6, "seed": 7} | changes
    return clipless.make_private(
        model, optimizer, dataset() if data is None else data, **{"loss_reduction": "mean", **settings}
    )


def fresh(model: nn.Module | None = None, data: Any = None, **changes: Any) -> tuple[nn.Module, Optimizer, Private]:
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, attach(model, optimizer, data, **changes)


def step(model: nn.Module, optimizer: Optimizer, batch: Any, weight: float = 1.0) -> None:
    optimizer.zero_grad()
    (weight * F.cross_entropy(model(batch[0]), batch[1])).backward()
    optimizer.step()


def steps(model: nn.Module, optimizer: Optimizer, private: Private, part_size: int | None = None) -> Iterator[int]:
    """The private steps that are left, in whole batches or in parts, taken one by one as they are asked for."""
    while private.ledger.steps < private.plan.steps:
        logical = private.loader.microbatches(part_size) if part_size else ([batch] for batch in private.loader)
        for parts in logical:
            optimizer.zero_grad()
            for x, y in parts:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            yield private.ledger.steps


def train(model: nn.Module, optimizer: Optimizer, private: Private, part_size: int | None = None) -> None:
    for _ in steps(model, optimizer, private, part_size):
        pass


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def hooks_on(model: nn.Module, optimizer: Optimizer) -> list[object]:
    """Everything that is registered anywhere on the model, its parameters and the optimizer."""
    places = [
        hooks
        for module in model.modules()
        for name, hooks in vars(module).items()
        if "_hooks" in name and isinstance(hooks, dict)
    ]
    places += [p._backward_hooks or {} for p in model.parameters()]
    places += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return [hook for hooks in places for hook in hooks.values()]


# Your model stays your model, your optimizer stays your optimizer.


def test_nothing_is_wrapped_renamed_or_replaced() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    model_type, optimizer_type, printed = type(model), type(optimizer), repr(model)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    values, state, attributes = (
        weights(model),
        optimizer.state_dict(),
        {key: set(vars(m)) for key, m in modules.items()},
    )
    attach(model, optimizer)
    assert (type(model), type(optimizer), repr(model)) == (model_type, optimizer_type, printed)
    assert all(one is modules[name] for name, one in model.named_modules())
    assert all(one is parameters[name] for name, one in model.named_parameters())
    assert list(model.state_dict()) == list(values)
    assert same(weights(model), values)
    assert optimizer.state_dict() == state
    assert all(p.requires_grad for p in model.parameters())
    assert {key: set(vars(m)) for key, m in model.named_modules()} == attributes


def test_state_dicts_load_while_attached() -> None:
    model, optimizer, private = fresh()
    for batch in private.loader:
        step(model, optimizer, batch)
    plain = network()
    plain.load_state_dict(model.state_dict())
    other = torch.optim.SGD(plain.parameters(), lr=0.5)
    other.load_state_dict(optimizer.state_dict())
    model.load_state_dict(network().state_dict())
    optimizer.load_state_dict(other.state_dict())
    assert same(weights(model), weights(network()))
    with pytest.raises(BudgetSpent):
        optimizer.step()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Linear(FEATURES, CLASSES)],
        lambda: [nn.Linear(FEATURES, 4), nn.Dropout(0.5), nn.Linear(4, CLASSES)],
        lambda: [nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)],
    ],
    ids=["linear", "dropout", "batchnorm"],
)
def test_evaluation_is_untouched(layers: Callable[[], list[nn.Module]], context: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*layers()).eval()
    plain = copy.deepcopy(model)
    attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = dataset().tensors[0]
    before = weights(model)
    with context():
        out, expected = model(x), plain(x)
    assert torch.equal(out, expected)
    assert out.requires_grad == expected.requires_grad
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    assert same(weights(model), before)


def test_evaluation_between_forward_and_backward_changes_nothing() -> None:
    released = []
    for disturbed in (False, True):
        model, optimizer, private = fresh()
        x, y = next(iter(private.loader))
        loss = F.cross_entropy(model(x), y)
        if disturbed:
            with torch.no_grad():
                model.eval()(dataset().tensors[0])
            model.train()
        loss.backward()
        optimizer.step()
        released.append(gradients(model))
    assert same(*released)


def test_methods_of_the_model_work_as_before() -> None:
    class Walker(nn.Module):
        """A model with a method that calls it again and again, as language models have."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.table(tokens).mean(1))

        @torch.no_grad()
        def generate(self, tokens: Tensor, length: int) -> Tensor:
            for _ in range(length):
                tokens = torch.cat([tokens, self(tokens).argmax(1, keepdim=True)], 1)
            return tokens

    model = Walker()
    expected = model.generate(torch.zeros(2, 1, dtype=torch.int64), 5)
    tokens = torch.randint(7, (SIZE, 3), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = attach(model, optimizer, TensorDataset(tokens, tokens[:, 0]))
    for batch in private.loader:
        step(model, optimizer, batch)
        assert torch.equal(model.generate(torch.zeros(2, 1, dtype=torch.int64), 5), expected)


def test_hooks_of_the_user_stay_and_see_what_the_model_returns() -> None:
    model = network()
    seen: list[Tensor] = []
    model[2].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    _, optimizer, private = fresh(model)
    for x, y in private.loader:
        seen.clear()
        out = model(x)
        assert torch.equal(seen[-1], out)
        F.cross_entropy(out, y).backward()
        optimizer.step()
    private.detach()
    assert len(hooks_on(model, optimizer)) == 1


def test_the_global_generator_is_left_alone() -> None:
    """Initialisation, dropout and shuffling elsewhere draw the numbers that they would have drawn."""
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model = network()
    torch.set_rng_state(state)
    train(*fresh(model))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "scheduled",
    [
        lambda o: StepLR(o, step_size=2),
        lambda o: LambdaLR(o, lambda t: 1 / (1 + t)),
        lambda o: CosineAnnealingLR(o, T_max=6),
        lambda o: OneCycleLR(o, max_lr=1.0, total_steps=6),
        lambda o: ReduceLROnPlateau(o, patience=0),
    ],
    ids=["step", "lambda", "cosine", "one-cycle", "plateau"],
)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_learning_rate_schedulers_work_as_before(scheduled: Callable[[Optimizer], Any], before: bool) -> None:
    def rates(optimizer: Optimizer, scheduler: Any, steps: Iterator[Callable[[], None]]) -> list[float]:
        taken = []
        for do_step in steps:
            do_step()
            scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
            taken.append(optimizer.param_groups[0]["lr"])
        return taken

    plain = torch.optim.SGD(network().parameters(), lr=0.1, momentum=0.9)
    expected = rates(plain, scheduled(plain), (plain.step for _ in range(5)))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = scheduled(optimizer) if before else None
    private = attach(model, optimizer, steps=5)
    batches = (partial(step, model, optimizer, batch) for batch in private.loader)
    assert rates(optimizer, scheduler or scheduled(optimizer), batches) == expected
    assert private.ledger.steps == 5
    assert len(set(expected)) > 1


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_file])
def test_a_copy_of_the_model_is_a_plain_model(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, optimizer, private = fresh()
    batches = iter(private.loader)
    step(model, optimizer, next(batches))
    twin, plain = copied(model), network()
    plain.load_state_dict(model.state_dict())
    assert same(weights(twin), weights(model))
    x, y = dataset().tensors
    for one in (twin, plain):
        one.zero_grad()
        F.cross_entropy(one(x), y).backward()
    assert same(gradients(twin), gradients(plain))
    moved = torch.optim.SGD(twin.parameters(), lr=1.0)
    moved.step()
    assert not same(weights(twin), weights(model))
    step(model, optimizer, next(batches))
    assert private.ledger.steps == 2
    attach(twin, moved)


def test_a_saved_model_is_loaded_by_another_process(tmp_path: Path) -> None:
    model, optimizer, private = fresh()
    step(model, optimizer, next(iter(private.loader)))
    torch.save(model, tmp_path / "model.pt")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    program = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "model.load_state_dict(torch.load(sys.argv[2]))\n"
        "model(torch.ones(2, 5)).sum().backward()\n"
        "assert all(p.grad is not None for p in model.parameters())\n"
    )
    done = children.run_code(program, tmp_path / "model.pt", tmp_path / "weights.pt", strict=True)
    assert done.returncode == 0, done.stderr


def test_an_averaged_model_follows() -> None:
    model, optimizer, private = fresh()
    average = torch.optim.swa_utils.AveragedModel(model)
    for batch in private.loader:
        step(model, optimizer, batch)
        average.update_parameters(model)
    assert same(weights(average.module), weights(model)) is False
    average.module(dataset().tensors[0]).sum().backward()
    assert all(p.grad is not None for p in average.module.parameters())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_does_with_the_private_gradient_what_it_always_does(make: Callable[..., Optimizer]) -> None:
    """The released gradients, given to the same optimizer on an ordinary copy, move it by the same bits."""
    model, plain = network(), network()
    optimizer, replayed = make(model.parameters()), make(plain.parameters())
    private = attach(model, optimizer, steps=4)
    start = weights(model)
    for batch in private.loader:
        step(model, optimizer, batch)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            other.grad = one.grad.clone()
        replayed.step()
    assert private.ledger.steps == 4
    assert same(weights(model), weights(plain))
    assert not any(torch.equal(value, start[name]) for name, value in model.state_dict().items())


def test_parameter_groups_keep_their_own_settings() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "lr": 1.0}]
    optimizer = torch.optim.SGD(groups)
    start = weights(model)
    step(model, optimizer, next(iter(attach(model, optimizer).loader)))
    assert torch.equal(model[0].weight, start["0.weight"])
    assert torch.equal(model[2].weight, start["2.weight"] - model[2].weight.grad)


# The gradient: hidden until it is private.


@pytest.mark.parametrize("part_size", [None, 4])
def test_gradients_are_hidden_until_step_sets_them(part_size: int | None) -> None:
    model, optimizer, private = fresh()
    for parts in private.loader.microbatches(part_size or SIZE):
        optimizer.zero_grad()
        for x, y in parts:
            F.cross_entropy(model(x), y).backward()
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_without_zero_grad_the_last_released_gradient_is_replaced_not_added_to() -> None:
    released = []
    for cleared in (True, False):
        model, optimizer, private = fresh()
        for x, y in private.loader:
            if cleared:
                optimizer.zero_grad()
            last = gradients(model)
            F.cross_entropy(model(x), y).backward()
            assert same(gradients(model), last)
            optimizer.step()
        released.append(gradients(model))
    assert same(*released)


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("part_size", [None, 5])
@pytest.mark.parametrize(
    "clipping",
    [
        "auto-s",
        "auto-v",
        "abadi",
        clipless.global_(cutoff=2.0),
        clipless.abadi(threshold=0.3, groups="per-layer"),
        clipless.auto_s(groups="per-parameter", allocation="equal-budget"),
        clipless.abadi(threshold=[0.1, 0.7], groups=[["*weight"], ["*bias"]], allocation="equal-budget"),
    ],
    ids=["auto-s", "auto-v", "abadi", "global", "per-layer", "per-parameter", "blocks"],
)
def test_step_releases_the_clipped_sum_plus_noise_over_the_expected_batch(
    clipping: Any, part_size: int | None, loss_reduction: str
) -> None:
    """The oracle's sum, plus the seed's numbers times the plan's standard deviation, over B."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = attach(model, optimizer, steps=3, clipping=clipping, loss_reduction=loss_reduction)
    by_group, group_of = private.plan.stddevs(0, private.thresholds).flatten().tolist(), private.plan.groups.group_of

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    sizes = []
    for number, parts in enumerate(private.loader.microbatches(part_size or SIZE)):
        seen = []
        for x, y in parts:
            seen.append((x, y))
            F.cross_entropy(model(x), y, reduction=loss_reduction).backward()
        optimizer.step()
        batch = [torch.cat(columns) for columns in zip(*seen, strict=True)]
        sizes.append(len(batch[0]))
        totals = oracle.clipped_sum(network(), losses, batch, clipping).grads
        drawn = seeded_normals(7, "gradient", number, model.parameters())
        for (name, parameter), normal in zip(model.named_parameters(), drawn, strict=True):
            assert parameter.grad is not None
            stddev = by_group[group_of[name]]
            assert_on_grid(parameter.grad, totals[name] + stddev * normal, stddev, 1e-5 * BATCH, divisor=BATCH)
    assert set(sizes) != {BATCH}, "realised and expected batch must differ for the test to mean anything"


def test_same_seed_same_run_other_seed_other_run() -> None:
    runs = []
    for seed in (7, 7, 8, None, None):
        model, optimizer, private = fresh(seed=seed)
        train(model, optimizer, private)
        runs.append(weights(model))
    first, again, other, unseeded, unseeded_too = runs
    assert same(first, again)
    assert not any(same(first, run) for run in (other, unseeded, unseeded_too))
    assert not same(unseeded, unseeded_too)


def test_an_unused_parameter_gets_noise_of_the_planned_size_and_nothing_else() -> None:
    """10,100 coordinates: their standard deviation is within 3.5 % by chance alone but for 1 in a million seeds."""
    released = []
    for weight in (1.0, 0.0):
        model, optimizer, private = fresh(WithUnused(100), noise_multiplier=2.0, clipping=clipless.abadi(threshold=3.0))
        step(model, optimizer, next(iter(private.loader)), weight)
        released.append(gradients(model))
    assert torch.equal(released[0]["unused.weight"], released[1]["unused.weight"])
    noise = torch.cat([released[0]["unused.weight"].flatten(), released[0]["unused.bias"]])
    assert noise.std().item() == pytest.approx(2.0 * 3.0 / BATCH, rel=0.035)


def test_a_frozen_parameter_gets_no_gradient_and_is_not_moved() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    start = weights(model)
    train(*fresh(model))
    assert model[0].weight.grad is None
    assert not model[0].weight.requires_grad
    assert torch.equal(model[0].weight, start["0.weight"])
    assert not torch.equal(model[0].bias, start["0.bias"])


def test_a_parameter_frozen_later_is_not_trained_by_noise() -> None:
    """As in plain torch it stays where it is; refusing the step would do as well."""
    model, optimizer, private = fresh()
    model[0].weight.requires_grad_(False)
    start = weights(model)
    with contextlib.suppress(Misuse):
        train(model, optimizer, private)
    assert torch.equal(model[0].weight, start["0.weight"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_gradient_has_the_type_of_its_parameter(dtype: torch.dtype) -> None:
    model, optimizer, private = fresh(
        network().to(dtype), dataset(dtype=dtype), noise_multiplier=1e-6, accountant="rdp"
    )
    for x, y in private.loader:
        optimizer.zero_grad()
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        assert all(p.grad.dtype == p.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())
    assert private.ledger.steps == 6


def test_a_float64_model_is_summed_in_float64() -> None:
    """The same run in float32 differs by rounding only: same batch, same noise, which here is far smaller than that."""
    released = []
    for dtype in (torch.float64, torch.float32):
        model, optimizer, private = fresh(
            network().to(dtype), dataset(dtype=dtype), noise_multiplier=1e-6, accountant="rdp"
        )
        step(model, optimizer, next(iter(private.loader)))
        released.append(gradients(model))
    for name, grad in released[0].items():
        torch.testing.assert_close(grad, released[1][name].double(), rtol=1e-4, atol=1e-6)
        assert not torch.equal(grad, grad.float().double())


# Passes and the budget.


@pytest.mark.parametrize(
    ("size", "batch", "steps"),
    [
        (60, 12, 5),
        (60, 60, 1),
        (60, 59, 1),
        (60, 41, 1),
        (60, 39, 2),
        (7, 2, round(7 / 2)),
        (5, 2, round(5 / 2)),
        (3, 1, 3),
    ],
)
def test_a_pass_is_the_rounded_number_of_batches_in_the_data(size: int, batch: int, steps: int) -> None:
    model, optimizer, private = fresh(data=dataset(size), batch_size=batch, epochs=2, steps=None)
    assert (len(private.loader), private.epochs, private.plan.steps) == (steps, 2, 2 * steps)
    for epoch in range(private.epochs):
        count = 0
        for one in private.loader:
            step(model, optimizer, one)
            count += 1
        assert count == steps
        assert private.ledger.steps == (epoch + 1) * steps


@pytest.mark.parametrize("steps", [1, 6, 23])
def test_with_steps_a_pass_is_all_of_them(steps: int) -> None:
    model, optimizer, private = fresh(steps=steps)
    assert (len(private.loader), private.epochs, private.plan.steps) == (steps, 1, steps)
    train(model, optimizer, private)
    assert private.ledger.steps == steps


def test_a_pass_after_a_broken_off_one_ends_with_the_budget() -> None:
    model, optimizer, private = fresh(epochs=2, steps=None)
    for number, batch in enumerate(private.loader):
        step(model, optimizer, batch)
        if number == 2:
            break
    counts = [sum(step(model, optimizer, batch) is None for batch in private.loader) for _ in range(2)]
    assert counts == [5, 2]


@pytest.mark.parametrize("how", ["pass", "micro-batches", "step"])
def test_nothing_is_released_after_the_budget_is_spent(how: str) -> None:
    model, optimizer, private = fresh()
    train(model, optimizer, private)
    before, spent = weights(model), private.spent()
    with pytest.raises(BudgetSpent, match="allow_overspend=True"):
        {
            "pass": lambda: next(iter(private.loader)),
            "micro-batches": lambda: next(iter(private.loader.microbatches(3))),
            "step": optimizer.step,
        }[how]()
    assert same(weights(model), before)
    assert private.spent() == spent


def test_overspending_is_possible_when_asked_for_and_is_counted() -> None:
    model, optimizer, private = fresh(allow_overspend=True, noise_multiplier=None, epsilon=2.0)
    for _ in range(2):
        for batch in private.loader:
            step(model, optimizer, batch)
    assert private.ledger.steps == 12
    assert private.spent().epsilon > private.plan.epsilon == 2.0


@pytest.mark.parametrize(("size", "expected"), [(20, 1e-5), (20_000, 5e-6)])
def test_without_delta_it_follows_from_the_size_of_the_data(size: int, expected: float) -> None:
    private = fresh(data=dataset(size), delta=None)[2]
    assert private.plan.delta == private.spent().delta == expected
    assert fresh(data=dataset(size), delta=1e-6)[2].plan.delta == 1e-6


@pytest.mark.parametrize("accountant", ["pld", "rdp", "gdp"])
def test_spent_grows_with_the_ledger_up_to_the_promise(accountant: str) -> None:
    model, optimizer, private = fresh(accountant=accountant, noise_multiplier=None, epsilon=3.0)
    plan = private.plan
    assert private.spent() == clipless.Spent(0.0, 1e-5, 0, accountant)
    epsilons = []
    for batch in private.loader:
        step(model, optimizer, batch)
        epsilons.append(private.spent().epsilon)
    assert epsilons == sorted(set(epsilons))
    assert 2.9 < epsilons[-1] <= 3.0
    assert private.spent().approximation == plan.approximation == (accountant == "gdp")
    assert ("approximation" in str(plan)) == ("approximation" in repr(private.spent())) == (accountant == "gdp")
    expected = clipless.epsilon(plan.noise_multiplier, plan.sample_rate, 6, 1e-5, accountant)
    assert private.spent().epsilon == pytest.approx(expected)


@pytest.mark.parametrize("clipping", ["auto-s", "auto-v", "abadi", "global"])
def test_the_price_of_a_step_does_not_depend_on_the_clipping(clipping: str) -> None:
    for groups in ("flat", "per-layer", "per-parameter"):
        how = replace(clipless.clipping.as_clipping(clipping), groups=groups)
        model, optimizer, private = fresh(clipping=how)
        step(model, optimizer, next(iter(private.loader)))
        ((event, count),) = private.ledger.events
        assert count == 1
        assert (event.sample_rate, event.noise_multiplier) == (BATCH / SIZE, 1.0)


def test_a_step_is_in_the_ledger_even_if_the_optimizer_fails_after_it() -> None:
    """The event is written down before the result can be seen, so a crash never makes a run look cheaper."""

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise OSError("out of something")

    model = network()
    optimizer = Failing(model.parameters(), lr=0.1)
    private = attach(model, optimizer)
    with pytest.raises(OSError, match="out of something"):
        step(model, optimizer, next(iter(private.loader)))
    assert private.ledger.steps == 1


def test_a_step_whose_noise_fails_shows_nothing_and_cannot_be_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is added where the sum lies: half of it may be there already, and twice the same would not be the plan's."""
    model, optimizer, private = fresh()
    source, release = private._source, private._source.release

    def failing(stream: str, step: int, values: list[Tensor], *rest: Any, **more: Any) -> Iterator[Tensor]:
        release(stream, step, values, *rest, **more)
        raise OSError("out of something")

    monkeypatch.setattr(source, "release", failing)
    batches, before = iter(private.loader), weights(model)
    with pytest.raises(OSError, match="out of something"):
        step(model, optimizer, next(batches))
    monkeypatch.undo()
    with pytest.raises(Misuse):
        optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    assert same(weights(model), before)
    step(model, optimizer, next(batches))
    assert private.ledger.steps == 1


def test_the_plan_says_what_is_promised_and_cannot_be_changed() -> None:
    plan = fresh(noise_multiplier=None, epsilon=3.0, clipping="abadi")[2].plan
    assert (plan.epsilon, plan.delta, plan.dataset_size, plan.expected_batch) == (3.0, 1e-5, SIZE, BATCH)
    assert (plan.sampling, plan.noise, plan.loss_reduction) == ("poisson", "seeded", "mean")
    for fragment in ("(3, 1e-05)", "60 records", "zero-out", "pld", "poisson", "abadi", "39 trainable"):
        assert fragment in str(plan)
    with pytest.raises(FrozenInstanceError):
        plan.noise_multiplier = 0.1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("clipping", "expected"),
    [
        ("auto-s", [1.0]),
        (clipless.abadi(threshold=2.0, groups="per-layer"), [2 / math.sqrt(2)] * 2),
        (clipless.abadi(threshold=[0.5, 3.0], groups="per-layer"), [0.5, 3.0]),
        (clipless.global_(cutoff=4.0, threshold=0.5, groups="per-parameter"), [0.25] * 4),
    ],
)
def test_thresholds_are_shown_as_a_copy(clipping: Any, expected: list[float]) -> None:
    private = fresh(clipping=clipping)[2]
    torch.testing.assert_close(private.thresholds, torch.tensor(expected).unsqueeze(1))
    private.thresholds.zero_()
    assert private.thresholds.min() > 0


# Data.


def as_dict(records: list[Any]) -> dict[str, Tensor]:
    x, y = default_collate(records)
    return {"x": x, "y": y}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_is_taken_over(workers: int) -> None:
    loader = DataLoader(dataset(), batch_size=BATCH, shuffle=True, num_workers=workers, collate_fn=as_dict)
    model, optimizer, private = fresh(data=loader, batch_size=None)
    assert (private.plan.expected_batch, private.plan.dataset_size) == (BATCH, SIZE)
    for batch in private.loader:
        assert isinstance(batch, dict)
        step(model, optimizer, (batch["x"], batch["y"]))
    twin, other, direct = fresh()
    train(twin, other, direct)
    assert same(weights(model), weights(twin))


def test_a_batch_size_beside_the_dataloader_must_be_the_same() -> None:
    loader = DataLoader(dataset(), batch_size=BATCH)
    assert fresh(data=loader, batch_size=BATCH)[2].plan.expected_batch == BATCH
    with pytest.raises(InvalidArgument, match="contradicts the DataLoader's batch_size=12"):
        fresh(data=loader, batch_size=BATCH + 1)


@pytest.mark.parametrize("part_size", [1, 3, 7, 1000])
def test_micro_batches_are_one_batch(part_size: int) -> None:
    """The noise is the same bit for bit (seen on an unused layer), the sums differ by rounding."""
    released, counts = [], []
    for size in (None, part_size):
        model, optimizer, private = fresh(WithUnused())
        history = []
        for parts in private.loader.microbatches(size or SIZE):
            optimizer.zero_grad()
            sizes = []
            for x, y in parts:
                sizes.append(len(x))
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            history.append(gradients(model))
            assert all(0 < n <= (size or SIZE) for n in sizes)
            assert all(n == size for n in sizes[:-1])
        released.append(history)
        counts.append(private.ledger)
    assert counts[0] == counts[1]
    assert counts[0].steps == 6
    for whole, parts in zip(*released, strict=True):
        for name, grad in whole.items():
            if name.startswith("unused"):
                assert torch.equal(grad, parts[name])
            torch.testing.assert_close(grad, parts[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("done", [0, 1, 2])
def test_step_before_all_parts_is_refused(done: int) -> None:
    model, optimizer, private = fresh(batch_size=SIZE)
    before = weights(model)
    parts = next(iter(private.loader.microbatches(SIZE // 3)))
    for _ in range(done):
        x, y = next(parts)
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(Misuse, match="for every micro-batch, before step") as refused:
        optimizer.step()
    assert not any(map(str.isdigit, str(refused.value))), "how many records are in a batch is not for logs"
    assert private.ledger.steps == 0
    assert same(weights(model), before)
    for x, y in parts:
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert private.ledger.steps == 1


# State: interrupted, saved, continued.


@pytest.mark.parametrize("make", ["momentum", "adam"])
@pytest.mark.parametrize("at", [0, 1, 5, 7])
@pytest.mark.parametrize("part_size", [None, 5])
def test_a_resumed_run_is_bit_identical(tmp_path: Path, make: str, at: int, part_size: int | None) -> None:
    def begin(seed: int | None) -> tuple[nn.Module, Optimizer, Private]:
        model = network()
        optimizer = OPTIMIZERS[make](model.parameters())
        return model, optimizer, attach(model, optimizer, epochs=2, steps=None, seed=seed)

    whole = begin(seed=5)
    train(*whole, part_size)
    model, optimizer, private = begin(seed=5)
    for _ in itertools.islice(steps(model, optimizer, private, part_size), at):
        pass
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "private": private.state_dict()}
    torch.save(states, tmp_path / "run.pt")
    model, optimizer, private = begin(seed=99)
    loaded = torch.load(tmp_path / "run.pt", weights_only=True)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    private.load_state_dict(loaded["private"])
    assert private.ledger.steps == at
    train(model, optimizer, private, part_size)
    assert private.ledger == whole[2].ledger
    assert private.spent() == whole[2].spent()
    assert same(weights(model), weights(whole[0]))


@pytest.mark.parametrize("backward", [False, True])
def test_saving_in_the_middle_of_a_batch_is_refused(backward: bool) -> None:
    model, optimizer, private = fresh()
    x, y = next(iter(private.loader))
    if backward:
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(Misuse, match=r"save after optimizer\.step"):
        private.state_dict()
    if not backward:
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert private.state_dict()["draws"] == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"noise_multiplier": 2.0}, "noise_multiplier"),
        ({"batch_size": 13}, "expected_batch"),
        ({"steps": 7}, "steps"),
        ({"delta": 1e-4}, "delta"),
        ({"accountant": "rdp"}, "accountant"),
        ({"clipping": "abadi"}, "clipping"),
        ({"clipping": clipless.auto_s(gamma=0.1)}, "clipping"),
        ({"clipping": clipless.auto_s(threshold=2.0)}, "clipping"),
        ({"clipping": clipless.auto_s(groups="per-layer")}, "groups"),
        ({"loss_reduction": "sum"}, "loss_reduction"),
    ],
    ids=str,
)
def test_a_state_of_another_plan_is_refused_by_what_differs(changes: dict[str, Any], named: str) -> None:
    state = fresh()[2].state_dict()
    private = fresh(**changes)[2]
    with pytest.raises(InvalidArgument, match=f"another plan.*{named}"):
        private.load_state_dict(state)
    assert private.ledger.steps == 0


def test_loading_after_training_began_is_refused() -> None:
    model, optimizer, private = fresh()
    state = private.state_dict()
    step(model, optimizer, next(iter(private.loader)))
    with pytest.raises(Misuse, match="fresh make_private"):
        private.load_state_dict(state)
    assert private.ledger.steps == 1


@pytest.mark.parametrize("missing", [None, "plan", "ledger", "policy", "draws", "noise"])
def test_a_broken_state_is_refused_and_nothing_of_it_is_taken(missing: str | None) -> None:
    model, optimizer, private = fresh()
    step(model, optimizer, next(iter(private.loader)))
    state = private.state_dict()
    broken = {} if missing is None else {key: value for key, value in state.items() if key != missing}
    target = fresh(seed=9)[2]
    before = target.state_dict()
    with pytest.raises(clipless.CliplessError, match=missing or "plan"):
        target.load_state_dict(broken)
    after = target.state_dict()
    assert {key: after[key] for key in ("ledger", "draws", "noise")} == {
        key: before[key] for key in ("ledger", "draws", "noise")
    }


def test_a_saved_state_is_a_snapshot() -> None:
    model, optimizer, private = fresh()
    state = private.state_dict()
    kept = copy.deepcopy(state)
    train(model, optimizer, private)
    assert (state["ledger"], state["draws"], state["noise"]) == (kept["ledger"], kept["draws"], kept["noise"])
    assert same(dict(state["policy"]), dict(kept["policy"]))


# detach: everything off.


def test_detach_leaves_a_plain_model_and_a_plain_optimizer() -> None:
    everywhere = set(_global_optimizer_pre_hooks)
    model, optimizer, private = fresh()
    assert hooks_on(model, optimizer)
    train(model, optimizer, private)
    private.detach()
    assert hooks_on(model, optimizer) == []
    assert set(_global_optimizer_pre_hooks) <= everywhere
    plain = network()
    plain.load_state_dict(model.state_dict())
    twin = torch.optim.SGD(plain.parameters(), lr=0.1)
    batch = dataset().tensors
    for one, optim in ((model, optimizer), (plain, twin)):
        step(one, optim, batch)
    assert same(gradients(model), gradients(plain))
    assert same(weights(model), weights(plain))


def test_detach_in_the_middle_of_anything_puts_the_parameters_back() -> None:
    model, optimizer, private = fresh()
    x, y = next(iter(private.loader))
    F.cross_entropy(model(x), y).backward()
    private.detach()
    private.detach()
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    step(model, optimizer, (x, y))


def test_a_detached_model_can_be_made_private_anew() -> None:
    model, optimizer, private = fresh()
    train(model, optimizer, private)
    for again in range(2):
        private.detach()
        private = attach(model, optimizer, seed=again)
        assert private.ledger.steps == 0
        train(model, optimizer, private)
        assert private.ledger.steps == 6


def test_detaching_an_old_run_does_not_open_the_door_to_a_second_one() -> None:
    """After detach, attach, and detach of the first again, the model is still attached once."""
    model, optimizer, old = fresh()
    old.detach()
    attach(model, optimizer)
    old.detach()
    with pytest.raises(Misuse, match="private already"):
        attach(model, optimizer)


def test_a_layer_that_was_taken_out_is_free_after_detach() -> None:
    model, _, private = fresh()
    layer, model[2] = model[2], nn.Linear(4, CLASSES)
    private.detach()
    layer(torch.ones(2, 4)).sum().backward()
    attach(layer, torch.optim.SGD(layer.parameters(), lr=0.1), TensorDataset(torch.ones(SIZE, 4)))


def test_a_run_that_is_dropped_leaves_nothing_behind() -> None:
    everywhere = set(_global_optimizer_pre_hooks)
    train(*fresh())
    gc.collect()
    assert set(_global_optimizer_pre_hooks) <= everywhere
