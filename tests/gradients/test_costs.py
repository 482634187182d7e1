"""What a private step costs over a plain one, in operations, calls and bytes: counted, never timed."""

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import clipless
from clipless.app.bench.problems import PROBLEMS, Problem, decoder, encoder, lora_encoder, words_of
from clipless.gradients import Kernels, kernels
from clipless.gradients.forms import Instantiated, OuterProducts
from clipless.gradients.layers import conv_rows
from clipless.native import gram, rows
from clipless.noise import NoiseSource

# The benchmark's models with fewer layers, words and records: the costs of a layer and a record stay what they are.
SMALL = PROBLEMS | {
    "resnet18": replace(PROBLEMS["resnet18"], batch=2),
    "encoder": replace(
        PROBLEMS["encoder"], batch=4, build=lambda: encoder(depth=1, words=500), inputs=words_of(128, 500)
    ),
    "decoder": replace(
        PROBLEMS["decoder"], batch=2, build=lambda: decoder(depth=1, words=2000), inputs=words_of(128, 2000)
    ),
    "lora": replace(
        PROBLEMS["lora"], batch=4, build=lambda: lora_encoder(depth=1, words=500), inputs=words_of(128, 500)
    ),
}
FEW_IMAGES = replace(PROBLEMS["cnn"], batch=8)
WEIGHT_GRADIENT = torch.ops.aten.convolution_backward.default
FLAT, PER_LAYER = clipless.auto_s(), clipless.auto_s(groups="per-layer")


@pytest.fixture(autouse=True)
def counted_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations of torch are counted, so no product is compiled here."""
    for module in (conv_rows, rows, gram):
        monkeypatch.setattr(module, "compiled", lambda: None)


def convolution_backward_flops(
    grad: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: Any,
    output_padding: Any, groups: int, mask: list[bool], out_shape: Any = None, **_: Any,
) -> int:  # fmt: skip
    """Two operations for every product in the gradient of the input and in that of the weight; torch's own count takes a
    grouped convolution for a full one."""
    each = 2 * math.prod(grad) * math.prod(weight[1:])
    return each * (mask[0] + mask[1])


def steps(problem: Problem, clipping: clipless.Clipping | None, kernels: Kernels | None = None) -> Iterator[Any]:
    """A training step at every call of `next`; yields the private run, None if it is plain training."""
    model, x, y = problem.make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    private, batches = None, iter(lambda: (x, y), None)
    if clipping is not None:
        private = clipless.make_private(
            model, optimizer, TensorDataset(x, y), noise_multiplier=1.0, delta=1e-5, batch_size=problem.batch, steps=99,
            clipping=clipping, seed=1, kernels=kernels, loss_reduction="mean"
        )  # fmt: skip
        batches = iter(private.loader)  # type: ignore[assignment]
    for inputs, targets in batches:
        optimizer.zero_grad()
        problem.loss(model(inputs), targets).backward()
        optimizer.step()
        yield private


def ordinary(problem: Problem, clipping: clipless.Clipping | None) -> Iterator[Any]:
    """The steps after the first two, which check themselves."""
    one = steps(problem, clipping)
    next(one)
    next(one)
    return one


def flops(problem: Problem, clipping: clipless.Clipping | None) -> int:
    one = ordinary(problem, clipping)
    with FlopCounterMode(
        display=False, custom_mapping={WEIGHT_GRADIENT.overloadpacket: convolution_backward_flops}
    ) as count:
        next(one)
    return count.get_total_flops()


# Operations over plain training: what the norms cost. One layer at a time nothing is computed twice but by the ghost method,
# which is only taken where its Gram matrices are small.
BOUNDS = {
    "mlp": (1.0, 1.0),
    "cnn": (1.01, 1.01),
    "resnet18": (1.1, 1.1),
    "encoder": (1.16, 1.01),
    "decoder": (1.01, 1.01),
    "lora": (1.01, 1.01),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_few_operations_more_than_plain_training(name: str) -> None:
    plain = flops(SMALL[name], None)
    for clipping, bound in zip((FLAT, PER_LAYER), BOUNDS[name], strict=True):
        assert flops(SMALL[name], clipping) <= bound * plain


class Calls(TorchDispatchMode):
    """Counts the operations that are called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def matrix_products(layers: int, clipping: clipless.Clipping | None) -> int:
    problem = PROBLEMS["mlp"]
    deep = Problem("deep", "deep", 8, lambda: _deep(layers), problem.inputs, 10)
    one = ordinary(deep, clipping)
    with Calls() as calls:
        next(one)
    return sum(name in {"mm", "addmm", "bmm", "baddbmm"} for name in calls.names)


def _deep(layers: int) -> nn.Module:
    return nn.Sequential(nn.Linear(784, 32), *(nn.Linear(32, 32) for _ in range(layers)), nn.Linear(32, 10))


@pytest.mark.parametrize("clipping", [FLAT, PER_LAYER], ids=["flat", "per-layer"])
def test_one_weight_gradient_for_each_layer(clipping: clipless.Clipping) -> None:
    """A linear layer on vectors takes as many matrix products as in plain training, however deep the model is."""
    assert matrix_products(2, clipping) == matrix_products(2, None)
    assert matrix_products(9, clipping) == matrix_products(9, None)


def test_a_frozen_model_costs_no_weight_gradients() -> None:
    """Low-rank additions to a frozen encoder: no product as large as a weight of the encoder is computed for norms."""
    plain, private = flops(SMALL["lora"], None), flops(SMALL["lora"], FLAT)
    full = flops(SMALL["encoder"], None)
    assert private - plain < 0.01 * (full - plain)


class HeldBuffers:
    """The bytes of forms and of what is kept for them when the backward pass is over, and the most in between."""

    def __init__(self, private: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        sums, take = private._engine._sums, private._engine._sums.take
        self.most = 0

        def watched(*args: Any) -> None:
            take(*args)
            self.most = max(self.most, held_bytes([[*group.held.values()] for group in sums._open]))

        monkeypatch.setattr(sums, "take", watched)


def held_bytes(thing: object) -> int:
    """Bytes of the memory behind all tensors in a structure of forms, lists and mappings, each storage once."""
    return sum(_storages(thing, set()).values())


def _storages(thing: object, seen: set[int]) -> dict[int, int]:
    if isinstance(thing, Tensor):
        if thing.layout != torch.strided:
            return _storages([thing._indices(), thing._values()] if thing.is_sparse else [], seen)
        return {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()}
    if id(thing) in seen or isinstance(thing, nn.Module | type):
        return {}
    seen.add(id(thing))
    if isinstance(thing, list | tuple):
        inside = list(thing)
    else:
        inside = list((thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})).values())
    return {pointer: size for each in inside for pointer, size in _storages(each, seen).items()}


def test_memory_is_that_of_the_buffers_behind_the_forms() -> None:
    acts, grads = torch.zeros(6, 1, 40), torch.zeros(6, 1, 30)
    assert held_bytes([OuterProducts(acts, grads)]) == 4 * 6 * (40 + 30)
    assert held_bytes([OuterProducts(acts, acts.mT), Instantiated(acts[:2])]) == 4 * 6 * 40


@pytest.mark.parametrize(("cap", "clipping"), [(0, FLAT), (2**24, FLAT), (2**25, FLAT), (0, PER_LAYER)])
def test_buffers_stay_under_the_cap(cap: int, clipping: clipless.Clipping, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over what the thriftiest methods hold: the inputs and gradients that backward itself has had in its hands."""
    problem = SMALL["decoder"]
    one = steps(problem, clipping, Kernels(memory_cap=cap))
    held = HeldBuffers(next(one), monkeypatch)
    next(one)
    thrifty = HeldBuffers(next(least := steps(problem, FLAT, Kernels(memory_cap=0))), monkeypatch)
    next(least)
    assert 0 < held.most <= thrifty.most + cap


def test_one_layer_at_a_time_holds_few_layers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {}
    for chunk, clipping in ((1, FLAT), (1, PER_LAYER), (2**21, PER_LAYER)):
        monkeypatch.setattr(kernels, "CHUNK_BYTES", chunk)
        one = steps(SMALL["encoder"], clipping)
        held = HeldBuffers(next(one), monkeypatch)
        next(one)
        most[clipping.groups, chunk] = held.most
    assert 0 < most["per-layer", 1] < 0.05 * most["flat", 1]
    assert most["per-layer", 1] < most["per-layer", 2**21] < most["per-layer", 1] + 2**21


def test_memory_of_sums_without_noise_is_never_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: set[int] = set()
    release = NoiseSource.release

    def spied(source: NoiseSource, stream: str, step: int, values: list[Tensor], *rest: Any, **more: Any) -> Any:
        sums.update(value.untyped_storage().data_ptr() for value in values)
        return release(source, stream, step, values, *rest, **more)

    monkeypatch.setattr(NoiseSource, "release", spied)
    one = steps(FEW_IMAGES, FLAT)
    for _ in range(4):
        parameters = next(one)._engine.parameters
        assert sums.isdisjoint(p.grad.untyped_storage().data_ptr() for p in parameters.values())
    assert len(sums) == len(parameters)


def test_nothing_without_noise_is_ever_seen_through_an_earlier_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in its storage, not through a weak reference to it, at no moment of the next steps."""
    one = steps(FEW_IMAGES, FLAT)
    weight = next(iter(next(one)._engine.parameters.values()))
    storage, weak, released = weight.grad.untyped_storage(), weakref.ref(weight.grad), weight.grad.clone()
    seen: list[Tensor] = []
    add = NoiseSource.release

    def looked(*args: Any, **more: Any) -> Any:
        there = weak()
        seen.append(torch.empty(0).set_(storage, 0, released.shape).clone())
        seen.extend([] if there is None else [there.clone()])
        return add(*args, **more)

    monkeypatch.setattr(NoiseSource, "release", looked)
    next(one)
    next(one)
    assert len(seen) >= 2
    assert all(torch.equal(value, released) for value in seen)


def sent(grad: Tensor) -> Tensor:
    """What another process has that was sent the gradient: the same memory, of which no count of references tells."""
    storage = torch.UntypedStorage._new_shared_fd_cpu(*grad.share_memory_().untyped_storage()._share_fd_cpu_())
    return torch.empty(0).set_(storage, 0, grad.shape)


HOLDERS = [lambda grad: grad, lambda grad: grad[0], Tensor.detach, Tensor.numpy, torch.from_dlpack, sent]


@pytest.mark.parametrize("hold", HOLDERS)
def test_a_gradient_that_somebody_holds_never_changes(hold: Callable[[Tensor], Any]) -> None:
    one = steps(FEW_IMAGES, FLAT)
    private = next(one)
    weight = next(iter(private._engine.parameters.values()))
    held = hold(weight.grad)
    before = torch.as_tensor(held).clone()
    next(one)
    next(one)
    assert torch.equal(torch.as_tensor(held), before)
    assert not torch.equal(torch.as_tensor(hold(weight.grad)), before)
