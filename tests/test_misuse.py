"""What is refused, with which remedy, and that a refusal leaves model, optimizer and ledger as they were."""

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import clipless
from clipless import CliplessError, InvalidArgument, InvalidType, Misuse, Private, UnsupportedModule

FEATURES, CLASSES = 4, 3
SIZE, BATCH = 40, 10


def dataset(size: int = SIZE) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (size,), generator=generator))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def attach(model: nn.Module, optimizer: Optimizer, data: Any = None, **changes: Any) -> Private:
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": BATCH, "steps": 20, "seed": 3} | changes
    return clipless.make_private(
        model, optimizer, dataset() if data is None else data, **{"loss_reduction": "mean", **settings}
    )


def state(model: nn.Module, optimizer: Optimizer, private: Private | None = None) -> list[Any]:
    """All that a refusal must leave alone: values, flags, gradients, hooks, optimizer state, ledger."""
    hooks = [
        (name, key, list(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if "_hooks" in key and isinstance(value, dict)
    ]
    parameters = [(name, p.requires_grad, list(p._backward_hooks or ())) for name, p in model.named_parameters()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    steps = [list(optimizer._optimizer_step_pre_hooks), list(optimizer._optimizer_step_post_hooks)]
    settings = copy.deepcopy(optimizer.state_dict())
    ledger = private.ledger.to_dict() if private else None
    return [hooks, parameters, values, gradients, steps, settings, ledger]


def equal(one: Any, other: Any) -> bool:
    left, right = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return left[1] == right[1] and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
        for a, b in zip(left[0], right[0], strict=True)
    )


@dataclass
class Run:
    """A private run in which one good step has been taken, so that there is a state to be damaged."""

    model: nn.Module = field(default_factory=network)
    changes: dict[str, Any] = field(default_factory=dict)
    make: Callable[..., Optimizer] = torch.optim.Adam
    warm: bool = True

    def __post_init__(self) -> None:
        self.optimizer = self.make(self.model.parameters(), lr=0.01)
        self.private = attach(self.model, self.optimizer, **self.changes)
        self.batches = iter(self.private.loader)
        if self.warm:
            self.good_step()
            self.optimizer.zero_grad()

    def loss(self, batch: Any = None) -> Tensor:
        x, y = self.batch() if batch is None else batch
        return F.cross_entropy(self.model(x), y)

    def batch(self) -> Any:
        """The batch that a refusal has left open, or else the next."""
        with suppress(Misuse):
            return self.private.loader.again()
        return next(self.batches)

    def good_step(self) -> None:
        steps = self.private.ledger.steps
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        assert self.private.ledger.steps == steps + 1
        assert all(p.grad is not None for p in self.model.parameters() if p.requires_grad)

    @contextmanager
    def refuses(self, error: type[BaseException], remedy: str) -> Iterator[None]:
        before = state(self.model, self.optimizer, self.private)
        with pytest.raises(error, match=remedy):
            yield
        assert equal(state(self.model, self.optimizer, self.private), before)


# Arguments of make_private.

NAN, INF = math.nan, math.inf


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(FEATURES)


ARGUMENTS: list[tuple[dict[str, Any], type[CliplessError], str]] = [
    ({"model": [1, 2]}, InvalidType, "must be a torch.nn.Module, got list"),
    ({"model": None}, InvalidType, "must be a torch.nn.Module"),
    ({"model": nn.Linear}, InvalidType, "must be a torch.nn.Module"),
    ({"model": nn.Tanh()}, InvalidArgument, "no trainable parameter: set requires_grad_"),
    ({"model": nn.Linear(2, 2).requires_grad_(False)}, InvalidArgument, "no trainable parameter: set requires_grad_"),
    ({"model": nn.LazyLinear(3)}, InvalidArgument, "run the model on one example first"),
    ({"model": nn.Linear(2, 2, dtype=torch.complex64)}, InvalidType, "only real floating-point"),
    ({"optimizer": "sgd"}, InvalidType, "must be a torch.optim.Optimizer, got str"),
    ({"optimizer": torch.optim.SGD}, InvalidType, "must be a torch.optim.Optimizer"),
    ({"optimizer": None}, InvalidType, "must be a torch.optim.Optimizer"),
    ({"dataset": None}, InvalidType, "must be a Dataset or a DataLoader"),
    ({"dataset": 7}, InvalidType, "must be a Dataset or a DataLoader, got int"),
    ({"dataset": iter([1])}, InvalidType, "must be a Dataset or a DataLoader"),
    ({"dataset": torch.zeros(9, 2)}, InvalidType, "in a TensorDataset"),
    ({"dataset": {"x": torch.zeros(9, 2)}}, InvalidType, "must be a Dataset"),
    ({"dataset": "digits"}, InvalidType, "must be a Dataset"),
    ({"dataset": []}, InvalidArgument, "data set is empty"),
    ({"dataset": TensorDataset(torch.zeros(0, 2))}, InvalidArgument, "data set is empty"),
    ({"dataset": DataLoader(TensorDataset(torch.zeros(0, 2)))}, InvalidArgument, "data set is empty"),
    ({"dataset": Stream()}, InvalidType, "give a Dataset with __len__ and __getitem__"),
    ({"dataset": DataLoader(Stream(), batch_size=BATCH)}, InvalidType, "give a Dataset with __len__ and __getitem__"),
    ({"noise_multiplier": None}, InvalidArgument, "give epsilon="),
    ({"epsilon": 3.0}, InvalidArgument, "epsilon= and noise_multiplier= contradict each other: give one"),
    ({"epochs": 2}, InvalidArgument, "epochs= and steps= contradict each other: give one"),
    ({"steps": None}, InvalidArgument, "give epochs= or steps="),
    ({"batch_size": None}, InvalidArgument, "give batch_size="),
    ({"batch_size": SIZE + 1}, InvalidArgument, "use at most 40"),
    *[({name: 0}, InvalidArgument, f"{name} must be at least 1") for name in ("batch_size", "steps")],
    *[({name: -3}, InvalidArgument, f"{name} must be at least 1") for name in ("batch_size", "steps")],
    *[
        ({name: value}, InvalidType, f"{name} must be a whole number")
        for name in ("batch_size", "steps")
        for value in (10.0, "10", True)
    ],
    *[({"epochs": value, "steps": None}, InvalidArgument, "epochs must be at least 1") for value in (0, -1)],
    *[({"epochs": value, "steps": None}, InvalidType, "epochs must be a whole number") for value in (1.5, "3")],
    *[
        ({"epsilon": value, "noise_multiplier": None}, InvalidArgument, "usual targets|is NaN")
        for value in (0, 0.0, -1.0, NAN, INF)
    ],
    *[
        ({"epsilon": value, "noise_multiplier": None}, InvalidType, "epsilon must be a number")
        for value in ("3", "three", [3.0], True)
    ],
    *[({"delta": value}, InvalidArgument, r"delta must lie in \(0, 1\)|is NaN") for value in (0, -1e-5, 1, 1.5, NAN)],
    *[
        ({"delta": value, "epsilon": 3.0, "noise_multiplier": None}, InvalidArgument, r"delta must lie in \(0, 1\)")
        for value in (0.0, 1.0)
    ],
    ({"delta": "1e-5"}, InvalidType, "delta must be a number"),
    *[({"noise_multiplier": value}, InvalidArgument, "noise_multiplier") for value in (0, -1.0, NAN, INF)],
    ({"noise_multiplier": "1"}, InvalidType, "noise_multiplier must be a number"),
    ({"clipping": "auto_s"}, InvalidArgument, "unknown clipping 'auto_s': did you mean 'auto-s'"),
    ({"clipping": "AUTO-V"}, InvalidArgument, "did you mean 'auto-v'"),
    ({"clipping": "abbadi"}, InvalidArgument, "did you mean 'abadi'"),
    ({"clipping": "xyzzy"}, InvalidArgument, "Valid: 'auto-s'"),
    ({"clipping": 3}, InvalidType, "a name such as 'auto-s' or an object"),
    ({"clipping": clipless.abadi}, InvalidType, "a name such as 'auto-s' or an object"),
    ({"clipping": clipless.abadi(groups="per_layer")}, InvalidArgument, "did you mean 'per-layer'"),
    ({"clipping": clipless.abadi(groups="per-params")}, InvalidArgument, "did you mean 'per-parameter'"),
    ({"clipping": clipless.abadi(groups="flatt")}, InvalidArgument, "did you mean 'flat'"),
    ({"clipping": clipless.abadi(groups=5)}, InvalidType, "list of lists of parameter-name patterns"),
    ({"clipping": clipless.abadi(groups=["0.weight"])}, InvalidType, "list of lists of parameter-name patterns"),
    ({"clipping": clipless.abadi(groups=[["0"]])}, InvalidArgument, r"'2\.weight' is in no block: add a pattern"),
    ({"clipping": clipless.abadi(groups=[["*"], ["2"]])}, InvalidArgument, "is in 2 blocks"),
    ({"clipping": clipless.abadi(groups=[["*"], ["9"]])}, InvalidArgument, "matches no trainable parameter: remove it"),
    ({"clipping": clipless.abadi(threshold=[1.0, 2.0])}, InvalidArgument, "give one for each group"),
    ({"clipping": clipless.abadi(allocation="equal")}, InvalidArgument, "did you mean 'equal-budget'"),
    ({"accountant": "pdl"}, InvalidArgument, "unknown accountant 'pdl': did you mean 'pld'"),
    ({"accountant": "RDP"}, InvalidArgument, "did you mean 'rdp'"),
    ({"noise": "secre"}, InvalidArgument, "unknown noise source 'secre': did you mean 'secure'"),
    ({"noise": "torch"}, InvalidArgument, "noise='torch' is now called 'seeded', and needs seed="),
    ({"noise": "seeded", "seed": None}, InvalidArgument, "noise='seeded' needs seed="),
    ({"noise": "secure", "seed": 3}, InvalidArgument, "noise='secure' takes no seed.*noise='seeded'"),
    ({"loss_reduction": "men"}, InvalidArgument, "unknown loss_reduction 'men': did you mean 'mean'"),
    ({"loss_reduction": "none"}, InvalidArgument, "Valid: 'mean', 'sum'"),
    *[({name: 3}, CliplessError, "Valid: ") for name in ("accountant", "noise", "loss_reduction")],
    *[({name: ["pld"]}, CliplessError, "Valid: ") for name in ("accountant", "noise", "loss_reduction")],
    *[({"seed": value}, InvalidType, "seed must be an integer or None") for value in (1.5, "7", True)],
    ({"seed": -1}, InvalidArgument, "seed must not be negative"),
    ({"allow_overspend": "no"}, InvalidType, "allow_overspend"),
]


def shown(number: int) -> str:
    """A name for a case: the arguments that are changed and what the message says."""
    changes, _, remedy = ARGUMENTS[number]
    return f"{'+'.join(changes)}: {remedy} ({number})"


@pytest.mark.parametrize("number", range(len(ARGUMENTS)), ids=shown)
def test_arguments_that_cannot_be_meant_are_refused(number: int) -> None:
    changes, error, remedy = ARGUMENTS[number]
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    settings = {"model": model, "optimizer": optimizer, "dataset": dataset()}
    settings |= {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": BATCH, "steps": 20}
    before, everywhere = state(model, optimizer), set(_global_optimizer_pre_hooks)
    with pytest.raises(error, match=remedy):
        clipless.make_private(**{"loss_reduction": "mean"} | settings | changes)
    assert equal(state(model, optimizer), before)
    assert set(_global_optimizer_pre_hooks) <= everywhere
    attach(model, optimizer).detach()


@pytest.mark.parametrize("value", [np.int64(BATCH), np.int32(BATCH)], ids=repr)
def test_whole_numbers_of_numpy_are_whole_numbers(value: Any) -> None:
    """`len(x) // 4` on an array's shape or a configuration read by numpy gives one of these."""
    model = network()
    private = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), batch_size=value, steps=value)
    assert (private.plan.expected_batch, private.plan.steps) == (BATCH, BATCH)


def records_with(sampler: Any = None, batch_sampler: Any = None) -> DataLoader[Any]:
    if batch_sampler is not None:
        return DataLoader(dataset(), batch_sampler=batch_sampler)
    return DataLoader(dataset(), batch_size=BATCH, sampler=sampler)


class OddOnes(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(1, SIZE, 2))


@pytest.mark.parametrize(
    "loader",
    [
        records_with(WeightedRandomSampler([1.0] * SIZE, SIZE)),
        records_with(SubsetRandomSampler(range(5))),
        records_with(RandomSampler(dataset(), replacement=True)),
        records_with(RandomSampler(dataset(), num_samples=SIZE // 2)),
        records_with(OddOnes(dataset())),
        records_with(list(range(SIZE))),
        records_with(batch_sampler=[[0, 1], [2, 3]]),
        records_with(batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * SIZE, SIZE), BATCH, False)),
        DataLoader(dataset(), batch_size=None),
    ],
    ids=["weighted", "subset", "replacement", "half", "subclass", "list", "batches", "weighted batches", "no batches"],
)
def test_a_dataloader_that_samples_in_its_own_way_is_refused(loader: DataLoader[Any]) -> None:
    """Only plain and shuffled loaders stand for 'these records, this many at a time'."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    before = state(model, optimizer)
    with pytest.raises(InvalidArgument, match="Give the data set, or a DataLoader with a plain batch_size"):
        attach(model, optimizer, loader, batch_size=BATCH)
    assert equal(state(model, optimizer), before)


# Optimizers.


def test_an_optimizer_that_lacks_a_trainable_parameter_is_refused() -> None:
    model = network()
    optimizer = torch.optim.Adam(model[0].parameters())
    before = state(model, optimizer)
    with pytest.raises(InvalidArgument, match=r"'2\.weight' \(and 1 more\): give it model\.parameters\(\), or freeze"):
        attach(model, optimizer)
    assert equal(state(model, optimizer), before)
    model[2].requires_grad_(False)
    attach(model, optimizer)


def test_an_optimizer_with_parameters_of_another_model_is_refused() -> None:
    model, other = network(), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()])
    before = state(model, optimizer)
    with pytest.raises(InvalidArgument, match="not the model's"):
        attach(model, optimizer)
    assert equal(state(model, optimizer), before)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_cannot_use_one_dense_gradient_are_refused(kind: Callable[..., Optimizer]) -> None:
    model = network()
    optimizer = kind(model.parameters())
    before = state(model, optimizer)
    with pytest.raises(InvalidArgument, match="take SGD, Adam or another"):
        attach(model, optimizer)
    assert equal(state(model, optimizer), before)


# Modules that mix records or remember them.


def after_linear(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 6), layer, nn.Linear(6, CLASSES))


UNSUPPORTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batchnorm": (
        lambda: after_linear(nn.BatchNorm1d(6)),
        r"GroupNorm \(clipless\.replace_batchnorm\(model\)\) or put it in eval",
    ),
    "without affine": (lambda: after_linear(nn.BatchNorm1d(6, affine=False)), "Replace it with GroupNorm"),
    "frozen": (lambda: after_linear(nn.BatchNorm1d(6).requires_grad_(False)), "Replace it with GroupNorm"),
    "synchronised": (lambda: after_linear(nn.SyncBatchNorm(6)), "Replace it with GroupNorm"),
    "no statistics": (lambda: after_linear(nn.BatchNorm1d(6, track_running_stats=False)), "Replace it with GroupNorm"),
    "no statistics, eval": (
        lambda: after_linear(nn.BatchNorm1d(6, track_running_stats=False)).eval(),
        "Replace it with GroupNorm",
    ),
    "images": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), "Replace it with GroupNorm"),
    "instance": (lambda: after_linear(nn.InstanceNorm1d(6, track_running_stats=True)), "track_running_stats=False"),
    "max_norm": (lambda: nn.Embedding(9, 3, max_norm=1.0), "max_norm=None"),
    "frequencies": (lambda: nn.Embedding(9, 3, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
    "bag": (lambda: nn.EmbeddingBag(9, 3, max_norm=1.0), "max_norm=None"),
    "bag frequencies": (lambda: nn.EmbeddingBag(9, 3, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
}


@pytest.mark.parametrize(("make", "remedy"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_modules_that_mix_or_remember_records_are_refused_by_name(make: Callable[[], nn.Module], remedy: str) -> None:
    """Alone and inside a larger model."""
    for model in (make(), nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"inner": make()}))):
        optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
        before = state(model, optimizer)
        with pytest.raises(UnsupportedModule, match=remedy):
            attach(model, optimizer)
        assert equal(state(model, optimizer), before)


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6).requires_grad_(False)],
    ids=["affine", "without affine", "frozen"],
)
@pytest.mark.parametrize("gradients", [True, False], ids=["training", "no_grad"])
def test_batchnorm_that_is_switched_on_later_is_refused(layer: nn.Module, gradients: bool) -> None:
    """model.train() in a loop is what everybody writes; under no_grad the statistics would leak all the same."""
    run = Run(after_linear(copy.deepcopy(layer)).eval(), warm=False)
    run.good_step()
    run.optimizer.zero_grad()
    x, _ = next(run.batches)
    run.model.train()
    with run.refuses(UnsupportedModule, "'1' mixes records.*eval"), torch.set_grad_enabled(gradients):
        run.model(x)
    run.model.eval()
    run.good_step()


class Tracking(nn.Module):
    """Keeps a running mean of what it sees, in place or by assignment."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.in_place:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        elif self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "assigned"])
def test_a_buffer_that_learns_from_the_records_is_refused_and_put_back(in_place: bool) -> None:
    run = Run(Tracking(in_place), warm=False)
    x, _ = next(run.batches)
    with run.refuses(UnsupportedModule, "buffer 'mean' changes.*put that module in eval mode"):
        run.model(x)
    run.model.eval()
    run.good_step()
    assert not run.model.mean.any()


def test_a_buffer_that_training_does_not_change_is_fine() -> None:
    run = Run(Tracking(in_place=True).eval())
    run.good_step()


# Batches.


def test_a_batch_of_ones_own_is_refused_before_and_after_a_step() -> None:
    run = Run()
    own = next(iter(DataLoader(dataset(), batch_size=BATCH)))
    for _ in range(2):
        with run.refuses(Misuse, r"did not come from private\.loader.*Iterate over private\.loader"):
            run.loss(own).backward()
        run.good_step()
        run.optimizer.zero_grad()


@pytest.mark.parametrize("change", [1, 7, -1, -3])
@pytest.mark.parametrize("warm", [True, False], ids=["later", "first"])
def test_more_or_fewer_rows_than_announced_are_refused(change: int, warm: bool) -> None:
    run = Run(warm=warm)
    x, y = next(run.batches)
    rows = torch.arange(len(x) + change) % len(x)
    with run.refuses(CliplessError, "rows are not the .*records"):
        run.loss((x[rows], y[rows])).backward()
    run.good_step()


def test_nothing_is_learned_from_a_first_batch_that_was_refused() -> None:
    """There are as many records as features here, so that the wrong number of rows is not obvious from the outside."""
    run = Run(nn.Linear(FEATURES, CLASSES), {"data": dataset(FEATURES), "batch_size": FEATURES}, warm=False)
    batch = next(run.batches)
    with run.refuses(CliplessError, "record"):
        run.loss(dataset(FEATURES + 3).tensors).backward()
    run.loss(batch).backward()
    run.optimizer.step()
    assert run.private.ledger.steps == 1


def test_rows_for_an_empty_batch_do_not_enter() -> None:
    """Refused, or without any influence: the release is that of an empty batch."""
    released = []
    for own in (False, True):
        run = Run(changes={"batch_size": 1, "steps": 100}, warm=False)
        while len((batch := run.batch())[0]):
            run.loss(batch).backward()
            run.optimizer.step()
        if own:
            batch = dataset()[:5]
        with suppress(Misuse, UnsupportedModule):
            run.loss(batch).backward()
        run.optimizer.step()
        released.append(run.model[0].weight.grad)
    assert torch.equal(*released)


def test_older_micro_batches_are_refused_once_the_next_was_fetched() -> None:
    run = Run()
    logical = iter(run.private.loader.microbatches(2))
    parts = next(logical)
    older = run.loss(next(parts))
    newer = run.loss(next(parts))
    with run.refuses(Misuse, "not on its newest one.*backward each batch before asking for the next"):
        older.backward()
    newer.backward()
    again = run.private.loader.microbatches(3).again()
    with run.refuses(Misuse, "use the newest"):
        next(parts)
    for part in again:
        run.loss(part).backward()
    run.optimizer.step()
    assert run.private.ledger.steps == 2


@pytest.mark.parametrize("parts", [None, 3])
def test_accumulating_over_two_logical_batches_is_refused(parts: int | None) -> None:
    """The first batch is not dropped silently."""
    run = Run()
    logical = iter(run.private.loader.microbatches(parts or SIZE))
    for batch in next(logical):
        run.loss(batch).backward()
    with run.refuses(Misuse, r"Call optimizer\.step\(\) after each batch.*private\.loader\.microbatches"):
        next(logical)
    run.optimizer.step()
    assert run.private.ledger.steps == 2
    run.batches = iter(run.private.loader)
    run.good_step()


def test_no_two_batches_are_the_same_draw_however_they_are_fetched() -> None:
    """Several iterators over one loader: refused, or fresh draws. The accountant counts on independent batches, so a
    batch that is trained on twice would cost more than the ledger says."""
    run = Run(warm=False)
    one, other = iter(run.private.loader), iter(run.private.loader)
    seen = []
    with suppress(Misuse):
        for batches in (one, other, one, iter(run.private.loader), other, one):
            batch = next(batches)
            seen.append(batch[0])
            run.loss(batch).backward()
            run.optimizer.step()
    assert seen
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


# backward and step.


@pytest.mark.parametrize("done", ["nothing", "fetched", "forward"])
def test_step_without_its_backward_is_refused(done: str) -> None:
    run = Run()
    if done != "nothing":
        batch = next(run.batches)
    if done == "forward":
        run.loss(batch)
    with run.refuses(Misuse, r"step\(\) without (a batch.*from private\.loader|its backward\(\).*loss\.backward\(\))"):
        run.optimizer.step()
    run.good_step()


def test_step_twice_is_refused() -> None:
    run = Run()
    run.good_step()
    with run.refuses(Misuse, r"step\(\) without a batch: take one from private\.loader"):
        run.optimizer.step()
    run.good_step()


@pytest.mark.parametrize("again", ["forward", "retain_graph"])
def test_two_backwards_on_one_batch_are_refused(again: str) -> None:
    """What was released afterwards is the first backward alone."""
    released = []
    for twice in (False, True):
        run = Run()
        batch = next(run.batches)
        loss = run.loss(batch)
        loss.backward(retain_graph=again == "retain_graph")
        if twice:
            second = loss if again == "retain_graph" else run.loss(batch)
            with run.refuses(Misuse, r"Add the losses and call backward\(\) once, or split.*microbatches"):
                second.backward()
        run.optimizer.step()
        released.append(run.model[0].weight.grad)
    assert torch.equal(*released)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_is_refused() -> None:
    run = Run()
    with run.refuses(Misuse, r"create_graph=True\) is not supported"):
        run.loss().backward(create_graph=True)
    run.good_step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("unscaled", [True, False])
def test_a_gradient_scaler_is_refused(kind: Callable[..., Optimizer], fused: bool, unscaled: bool) -> None:
    """A fused optimizer would divide gradient and noise by the scale. The refusal leaves no mark behind."""
    run = Run(make=lambda parameters, lr: kind(parameters, lr=lr, fused=fused))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(run.loss()).backward()
    if unscaled:
        scaler.unscale_(run.optimizer)
    with run.refuses(Misuse, "train without GradScaler"):
        scaler.step(run.optimizer)
    run.good_step()


def test_a_scaler_that_is_switched_off_is_harmless() -> None:
    run = Run()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(run.loss()).backward()
    scaler.step(run.optimizer)
    scaler.update()
    assert run.private.ledger.steps == 2


# Parameters that would be trained without their noise.


class Penalised(nn.Module):
    """Adds a penalty on its weights to every output."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.borrowed = nn.Linear(FEATURES, CLASSES), nn.Linear(4, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)

    def penalty(self) -> Tensor:
        return self.borrowed.weight.square().sum()


def test_a_parameter_used_outside_the_models_forward_is_refused_by_name() -> None:
    run = Run(Penalised(), warm=False)
    remedy = r"'borrowed\.weight' was used outside.*move the parameter into a small module"
    for _ in range(2):
        with run.refuses(UnsupportedModule, remedy):
            (run.loss() + run.model.penalty()).backward()
        with run.refuses(Misuse, r"step\(\) without its backward\(\)"):
            run.optimizer.step()


def test_a_penalty_on_the_weights_in_the_loss_is_refused_by_name() -> None:
    run = Run()
    loss = run.loss()
    with run.refuses(UnsupportedModule, r"'0\.weight' was used outside"):
        (loss + run.model[0].weight.square().sum()).backward()
    run.good_step()


def unfreeze(run: Run) -> None:
    run.model[0].bias.requires_grad_(True)


def register(run: Run) -> None:
    run.model.register_parameter("extra", nn.Parameter(torch.ones(2)))


def replace_layer(run: Run) -> None:
    run.model[2] = nn.Linear(5, CLASSES)


def replace_parameter(run: Run) -> None:
    run.model[2].weight = nn.Parameter(run.model[2].weight.detach().clone())


@pytest.mark.parametrize("change", [unfreeze, register, replace_layer, replace_parameter])
def test_a_parameter_that_became_trainable_later_is_refused_by_name(change: Callable[[Run], None]) -> None:
    """Nothing trainable without noise."""
    model = network()
    model[0].bias.requires_grad_(False)
    run = Run(model)
    change(run)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Misuse, match="became trainable after make_private: freeze it|another child or parameter after"):
        run.good_step()
    assert all(p.grad is None for p in run.model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert run.private.ledger.steps == 1


def test_a_parameter_group_that_was_added_later_is_refused() -> None:
    run = Run()
    extra = nn.Parameter(torch.ones(2))
    run.loss().backward()
    run.optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones(2)
    with run.refuses(Misuse, "add them before make_private"):
        run.optimizer.step()
    assert torch.equal(extra.detach(), torch.ones(2))


# Attached twice, replaced, taken off.


def around(model: nn.Module) -> nn.Module:
    return nn.Sequential(model, nn.Linear(CLASSES, CLASSES))


def inside(model: nn.Module) -> nn.Module:
    return model[0]


@pytest.mark.parametrize("related", [lambda model: model, around, inside], ids=["same", "around", "inside"])
def test_attaching_twice_is_refused(related: Callable[[nn.Module], nn.Module]) -> None:
    run = Run()
    model = related(run.model)
    optimizer = torch.optim.Adam(model.parameters())
    before = state(model, optimizer)
    with run.refuses(Misuse, r"private already: call detach\(\)"):
        attach(model, optimizer)
    assert equal(state(model, optimizer), before)
    run.good_step()
    run.private.detach()
    attach(model, optimizer)


def test_one_optimizer_for_two_runs_is_refused() -> None:
    run = Run()
    twin = network()
    for name, parameter in run.model.named_parameters():
        layer, local = name.split(".")
        setattr(twin[int(layer)], local, parameter)
    with run.refuses(Misuse, r"private already: call detach\(\)"):
        attach(twin, run.optimizer)
    run.good_step()


@pytest.mark.parametrize("when", ["before", "after"])
def test_another_optimizer_on_the_same_parameters_is_refused(when: str) -> None:
    run = Run()
    other = torch.optim.SGD(run.model[2].parameters(), lr=0.1)
    if when == "after":
        run.good_step()
    with run.refuses(Misuse, r"step the optimizer given to make_private, or detach\(\)"):
        other.step()
    stranger = nn.Linear(2, 2)
    stranger(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(stranger.parameters(), lr=0.1).step()
    run.good_step()
    run.private.detach()
    other.step()


def test_a_run_may_be_collected_while_the_optimizer_of_another_steps() -> None:
    """The garbage collector may run while torch goes through the hooks on all optimizers, and must not change them."""
    forgotten, run = [Run()], Run()
    guard = weakref.ref(forgotten[0].private._guard)

    def collect(*_: Any) -> None:
        forgotten.clear()
        gc.collect()

    handles = [register_optimizer_step_pre_hook(hook) for hook in (collect, lambda *_: None)]
    try:
        run.good_step()
    finally:
        for handle in handles:
            handle.remove()
    assert guard() is None


def clear(hooks: Any) -> None:
    if hooks:
        hooks.clear()


@pytest.mark.parametrize("which", ["all", "forward hooks", "pre-hooks", "one layer", "one layer's forward hooks"])
def test_hooks_that_were_taken_off_are_noticed(which: str) -> None:
    """No weight moves as if all were well when the clipped sum of a layer is missing."""
    run = Run()
    for module in run.model.modules() if "one layer" not in which else [run.model[0]]:
        if which != "pre-hooks":
            module._forward_hooks.clear()
        if "forward hooks" not in which:
            module._forward_pre_hooks.clear()
        if which == "all":
            for parameter in module.parameters():
                clear(parameter._backward_hooks)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with pytest.raises(RuntimeError, match="hooks were removed|outside its module|does not require grad|call detach"):
        run.good_step()
    with pytest.raises(RuntimeError, match="hooks were removed|call detach"):
        run.optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert run.private.ledger.steps == 1
    run.private.detach()
    assert all(p.requires_grad for p in run.model.parameters())


def test_an_optimizer_without_its_hook_has_nothing_to_step_with() -> None:
    run = Run()
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.optimizer._optimizer_step_pre_hooks.clear()
    run.loss().backward()
    with suppress(Misuse):
        run.optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert run.private.ledger.steps == 1


# The loop itself goes wrong.


def test_labels_out_of_range_leave_the_loop_intact() -> None:
    run = Run()
    x, y = next(run.batches)
    with run.refuses(IndexError, "out of bounds"):
        run.loss((x, y + CLASSES)).backward()
    run.good_step()
    assert run.private.ledger.steps == 2


class Fragile(nn.Linear):
    """Raises what it is told to."""

    trouble: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.trouble is not None:
            raise self.trouble
        return super().forward(x)


def fragile() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Sequential(Fragile(4, 4)), nn.Linear(4, CLASSES))


@pytest.mark.parametrize("warm", [True, False], ids=["later", "first"])
def test_a_forward_pass_that_fails_leaves_everything_as_it_was(warm: bool) -> None:
    run = Run(fragile(), warm=warm)
    run.model[1][0].trouble = ValueError("bad luck")
    with run.refuses(ValueError, "bad luck"):
        run.loss()
    run.model[1][0].trouble = None
    run.good_step()


AFTERWARDS: dict[str, Callable[[Run], Any]] = {
    "the batch again": lambda run: run.private.loader.again(),
    "evaluation": lambda run: run.model(torch.ones(2, FEATURES)),
    "detach": lambda run: run.private.detach(),
}


@pytest.mark.parametrize("warm", [True, False], ids=["later", "first"])
@pytest.mark.parametrize("afterwards", AFTERWARDS.values(), ids=AFTERWARDS)
def test_after_a_keyboard_interrupt_everything_comes_back(afterwards: Callable[[Run], Any], warm: bool) -> None:
    """torch calls no hooks then, so parameters may be switched off until the model or the loader is used again."""
    run = Run(fragile(), warm=warm)
    before = state(run.model, run.optimizer, run.private)
    run.model[1][0].trouble = KeyboardInterrupt("bad luck")
    with pytest.raises(KeyboardInterrupt, match="bad luck"):
        run.loss()
    run.model[1][0].trouble = None
    with torch.no_grad():
        afterwards(run)
    assert all(p.requires_grad for p in run.model.parameters())
    assert equal(state(run.model, run.optimizer, run.private)[2:4], before[2:4])
    assert run.private.ledger.steps == warm
    if afterwards is not AFTERWARDS["detach"]:
        run.good_step()


@pytest.mark.parametrize("trouble", [ValueError("bad luck"), KeyboardInterrupt("bad luck")], ids=repr)
def test_the_same_batch_again_after_an_interruption_gives_the_same_release(trouble: BaseException) -> None:
    released = []
    for interrupted in (False, True):
        run = Run(fragile())
        batch = next(run.batches)
        if interrupted:
            run.model[1][0].trouble = trouble
            with pytest.raises(type(trouble)):
                run.loss(batch)
            run.model[1][0].trouble = None
        run.loss(batch).backward()
        run.optimizer.step()
        released.append([p.grad for p in run.model.parameters()])
    assert equal(*released)


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", True, None])
def test_sizes_of_micro_batches_that_cannot_be_meant_are_refused(size: Any) -> None:
    run = Run()
    with run.refuses(CliplessError, "size of a micro-batch must be"):
        run.private.loader.microbatches(size)
    run.good_step()
