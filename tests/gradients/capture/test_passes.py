"""Forward and backward passes that torch runs in other pattern: compiled, scripted, checkpointed, or once more after an
exception."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clipless
from clipless import Misuse, Private, UnsupportedModule, oracle
from clipless.gradients import kernels
from clipless.gradients.checks.self_check import CheckSchedule

D, SIZE, BATCH = 6, 20, 4


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3))


def attach(
    model: nn.Module, clipping: str | clipless.Clipping = "abadi", size: int = BATCH, steps: int = 4
) -> tuple[Private, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(SIZE, D, generator=generator), torch.arange(SIZE) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"noise_multiplier": 1e-9, "delta": 1e-5, "batch_size": size, "steps": steps, "seed": 2}
    return clipless.make_private(
        model, optimizer, data, clipping=clipping, **{"loss_reduction": "mean", **settings}
    ), optimizer


def assert_released(
    model: nn.Module, batch: tuple[Tensor, Tensor], clipping: str | clipless.Clipping = "abadi", size: int = BATCH
) -> None:
    """The gradients are the clipped sum over the expected batch."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    plain = copy.deepcopy(model)
    plain.reentrant = False
    truth = oracle.clipped_sum(plain, losses, batch, clipping)
    for name, grad in truth.grads.items():
        torch.testing.assert_close(found[name] * size, grad, rtol=1e-4, atol=1e-5)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def compiled_layer(model: nn.Module) -> nn.Module:
    return nn.Sequential(torch.compile(model, backend="eager"), nn.Linear(3, 3))


def traced_layer(model: nn.Module) -> nn.Module:
    return nn.Sequential(torch.jit.trace(model, torch.randn(2, D)), nn.Linear(3, 3))


BEFORE: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "compile": (
        lambda model: torch.compile(model, backend="eager"),
        r"'\(model\)' is compiled.*Train the model it was",
    ),
    "compile in place": (compiled_in_place, r"'\(model\)' is compiled by torch.compile.*compile a copy"),
    "compile a layer": (compiled_layer, r"'0' is compiled by torch.compile"),
    "script": (torch.jit.script, r"'\(model\)' is compiled by TorchScript.*Use the module that it was made from"),
    "script a layer": (lambda m: nn.Sequential(torch.jit.script(m), nn.Linear(3, 3)), "'0' is compiled by TorchScript"),
    "trace a layer": (traced_layer, "'0' is compiled by TorchScript"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("change", "message"), BEFORE.values(), ids=BEFORE)
def test_what_was_compiled_before_is_refused(
    change: Callable[[nn.Module], nn.Module], message: str, fresh_compiler: None
) -> None:
    model = change(network())
    with pytest.raises(UnsupportedModule, match=message):
        attach(model)
    with pytest.raises(UnsupportedModule, match=message):
        clipless.clipped_sum(model, losses, (torch.randn(4, D), torch.arange(4) % 3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("change", [lambda model: torch.compile(model, backend="eager"), compiled_in_place])
def test_what_is_compiled_later_is_refused(change, gradients: bool, fresh_compiler: None) -> None:
    model = network()
    private, _ = attach(model)
    x, _ = next(iter(private.loader))
    run = change(model)
    with pytest.raises(Misuse, match="the model is run by torch.compile.*deepcopy"), torch.set_grad_enabled(gradients):
        run(x)
    plain = copy.deepcopy(network())
    torch.testing.assert_close(torch.compile(plain, backend="eager")(x), plain(x))
    private.detach()


@pytest.mark.filterwarnings("ignore")
def test_a_private_model_is_scripted_by_way_of_a_copy() -> None:
    model = network()
    private, _ = attach(model)
    with pytest.raises(Misuse, match="torch.jit.script of a private model.*deepcopy"):
        torch.jit.script(model)
    private.detach()


class Checkpointed(nn.Module):
    """A checkpoint with a layer before it, and one after it or none."""

    def __init__(self, reentrant: bool, last: bool) -> None:
        super().__init__()
        self.reentrant, self.first = reentrant, nn.Linear(D, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.last = nn.Identity() if last else nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, self.first(x).tanh(), use_reentrant=self.reentrant))


def outside(reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda model, x: checkpoint(model, x.requires_grad_(reentrant), use_reentrant=reentrant)


PASSES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "around the model": (network, outside(reentrant=False)),
    "around the model, reentrant": (network, outside(reentrant=True)),
    "inside": (lambda: Checkpointed(False, last=False), lambda model, x: model(x)),
    "inside, reentrant": (lambda: Checkpointed(True, last=False), lambda model, x: model(x)),
    "last": (lambda: Checkpointed(False, last=True), lambda model, x: model(x)),
    "last, reentrant": (lambda: Checkpointed(True, last=True), lambda model, x: model(x)),
}


@pytest.mark.parametrize("groups", ["flat", "per-layer"])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(("make", "forward"), PASSES.values(), ids=PASSES)
def test_checkpoints_agree_with_the_oracle(
    make: Callable[[], nn.Module], forward: Callable[[nn.Module, Tensor], Tensor], size: int, groups: str
) -> None:
    """Also for empty batches."""
    torch.manual_seed(0)
    model, how, sizes = make(), clipless.abadi(groups=groups), []
    private, optimizer = attach(model, how, size=size, steps=6)
    for x, y in private.loader:
        F.cross_entropy(forward(model, x), y).backward()
        optimizer.step()
        assert_released(model, (x.detach(), y), how, size)
        sizes.append(len(x))
    assert 0 in sizes if size == 1 else max(sizes) > 1
    private.detach()


class Failing(torch.autograd.Function):
    """The identity, whose gradient raises if asked to."""

    raises = False

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        if Failing.raises:
            raise MemoryError("no memory left")
        return grad


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(Failing.apply(self.one(x).tanh()))


def fail(model: nn.Module, x: Tensor, y: Tensor, retain: bool = False) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    Failing.raises = True
    try:
        with pytest.raises(MemoryError, match="no memory left"):
            loss.backward(retain_graph=retain)
    finally:
        Failing.raises = False
    return loss


@pytest.mark.parametrize("groups", ["flat", "per-layer"])
def test_a_batch_is_run_again_after_an_exception_in_backward(groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last layers were clipped and added before it."""
    monkeypatch.setattr(kernels, "CHUNK_BYTES", -1)
    model, how = Fragile(), clipless.abadi(groups=groups)
    private, optimizer = attach(model, how)
    for x, y in private.loader:
        fail(model, x, y)
        fail(model, x, y)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert_released(model, (x, y), how)
    assert private.ledger.steps == 4
    private.detach()


def test_backward_alone_after_an_exception_is_refused_until_the_batch_is_run_again() -> None:
    model = Fragile()
    private, optimizer = attach(model)
    x, y = next(iter(private.loader))
    loss = fail(model, x, y, retain=True)
    with pytest.raises(Misuse, match="interrupted by an exception: run the model on the same batch once more"):
        loss.backward()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert_released(model, (x, y))
    private.detach()


def test_a_micro_batch_is_run_again_if_nothing_of_it_was_added() -> None:
    model = Fragile()
    private, optimizer = attach(model)
    seen = []
    for parts in private.loader.microbatches(2):
        rows = []
        for x, y in parts:
            fail(model, x, y)
            F.cross_entropy(model(x), y).backward()
            rows.append((x, y))
        optimizer.step()
        seen.append(len(rows))
        assert_released(model, (torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])))
    assert max(seen) > 1
    private.detach()


def test_a_micro_batch_that_is_mixed_with_others_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHUNK_BYTES", -1)
    model = Fragile()
    private, optimizer = attach(model, clipless.abadi(groups="per-layer"))
    batches = iter(private.loader.microbatches(1))
    for x, y in next(batches):
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    monkeypatch.setattr(CheckSchedule, "due", lambda schedule, records: False)  # a check would fail first
    parts = next(batches)
    x, y = next(parts)
    F.cross_entropy(model(x), y).backward()
    x, y = next(parts)
    fail(model, x, y)
    with pytest.raises(Misuse, match="a part of it had been added to the others: start again from the last checkpoint"):
        model(x)
    private.detach()
