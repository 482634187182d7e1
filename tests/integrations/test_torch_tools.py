"""What people use around a PyTorch loop: each works on a private run, or is refused by name."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import clipless
from clipless.errors import CliplessError, Misuse

STEPS = 6


def dataset(size: int = 40) -> TensorDataset:
    x = torch.randn(size, 5, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def fresh(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Optimizer, clipless.Private]:
    model = network() if model is None else model
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.5)
    plan = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 10, "steps": STEPS, "accountant": "rdp", "seed": 3}
    return model, optimizer, clipless.make_private(model, optimizer, dataset(), **{**plan, **options})


def train(
    model: nn.Module, optimizer: Optimizer, private: clipless.Private, after: Callable[[], object] = lambda: None
) -> list[Tensor]:
    for x, y in private.loader:
        optimizer.zero_grad()
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        after()
    assert private.ledger.steps == STEPS
    return [p.detach().clone() for p in model.parameters()]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


# Compiling.


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_refused_and_its_copy_evaluates() -> None:
    """Before make_private, after it, and in place; `aot_eager` goes through autograd as the default backend does."""
    torch._dynamo.reset()
    with pytest.raises(CliplessError, match=r"is compiled by torch.compile.*model\._orig_mod"):
        fresh(torch.compile(network(), backend="aot_eager"))
    in_place = network()
    in_place.compile(backend="aot_eager")
    with pytest.raises(CliplessError, match="is compiled by torch.compile"):
        fresh(in_place)
    model, optimizer, private = fresh()
    x, y = next(iter(private.loader))
    with pytest.raises(Misuse, match="the model is run by torch.compile"):
        torch.compile(model, backend="aot_eager")(x)
    private.backward(F.cross_entropy(model(private.loader.again()[0]), y, reduction="none"))
    optimizer.step()
    assert private.ledger.steps == 1
    compiled = torch.compile(copy.deepcopy(model).eval(), backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model.eval()(x))
    torch._dynamo.reset()


# torch.func.


def test_a_functional_call_with_the_models_own_parameters_is_a_call() -> None:
    expected = train(*fresh())
    model, optimizer, private = fresh()
    for x, y in private.loader:
        output = functional_call(model, dict(model.named_parameters()), (x,))
        private.backward(F.cross_entropy(output, y, reduction="none"))
        optimizer.step()
    assert same([p.detach() for p in model.parameters()], expected)


def test_a_functional_call_with_other_parameters_trains_nothing() -> None:
    model, optimizer, private = fresh()
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    x, y = next(iter(private.loader))

    def step() -> None:
        private.backward(F.cross_entropy(functional_call(model, others, (x,)), y, reduction="none"))
        optimizer.step()

    with pytest.raises(CliplessError):
        step()
    assert private.ledger.steps == 0
    assert all(p.grad is None for p in model.parameters())


def test_per_sample_gradients_by_vmap_are_those_of_a_copy() -> None:
    """On the open batch of the private model they are refused; a copy is a plain model."""
    model, _, private = fresh()
    x, y = next(iter(private.loader))

    def gradients(subject: nn.Module) -> Any:
        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(subject, weights, (x[None],)), y[None])

        weights = {name: p.detach() for name, p in subject.named_parameters()}
        return vmap(grad(loss), (None, 0, 0))(weights, x, y)

    with pytest.raises(CliplessError):
        gradients(model)
    assert len(gradients(copy.deepcopy(model))["0.weight"]) == len(x)
    assert private.ledger.steps == 0


# Checkpointing of activations.


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = network(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.layers[:2], x.requires_grad_(), use_reentrant=self.reentrant)
        return self.layers[2](hidden)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations_change_no_bit(reentrant: bool) -> None:
    assert same(train(*fresh(Checkpointed(reentrant))), train(*fresh()))


# Averages of weights.


def test_moving_averages_follow_the_released_weights() -> None:
    model, optimizer, private = fresh()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected: list[Tensor] = []

    def after() -> None:
        average.update_parameters(model)
        now = [p.detach().clone() for p in model.parameters()]
        expected[:] = [0.5 * e + 0.5 * n for e, n in zip(expected, now, strict=True)] if expected else now

    train(model, optimizer, private, after)
    for found, own in zip(average.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), own)
    assert private.spent() == fresh()[2].plan.planned().spent(1e-5, "rdp"), "an average of releases costs nothing"


def test_stochastic_weight_averaging_with_its_scheduler() -> None:
    model, optimizer, private = fresh()
    average, scheduler = AveragedModel(model), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    kept: list[list[Tensor]] = []

    def after() -> None:
        scheduler.step()
        average.update_parameters(model)
        kept.append([p.detach().clone() for p in model.parameters()])

    train(model, optimizer, private, after)
    for found, *all_of_it in zip(average.parameters(), *kept, strict=True):
        torch.testing.assert_close(found.detach(), torch.stack(all_of_it).mean(0))
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_updating_batch_norm_on_private_batches_is_refused() -> None:
    """Its running statistics would be those of the records; and a batch that is not stepped is not dropped."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2))
    model, _, private = fresh(model)
    with pytest.raises(CliplessError, match="BatchNorm|not stepped"):
        update_bn(private.loader, AveragedModel(model))
    assert private.ledger.steps == 0


# Schedulers.

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: StepLR(o, 2, 0.5),
    "cosine": lambda o: CosineAnnealingLR(o, STEPS),
    "one cycle": lambda o: OneCycleLR(o, max_lr=1.0, total_steps=STEPS + 1),
    "warm-up": lambda o: LambdaLR(o, lambda step: min(1.0, (step + 1) / 3)),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_does_to_private_steps_what_it_does_to_plain_ones(make: Callable[[Optimizer], Any]) -> None:
    """The released gradients, replayed on a plain copy with the same scheduler, give the same bits."""
    model, optimizer, private = fresh()
    plain = network()
    replayed = SGD(plain.parameters(), lr=0.5, momentum=0.5)
    schedulers = [make(optimizer), make(replayed)]
    rates = set()

    def after() -> None:
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            other.grad = None if own.grad is None else own.grad.clone()
        replayed.step()
        for scheduler in schedulers:
            scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
        rates.add(optimizer.param_groups[0]["lr"])

    weights = train(model, optimizer, private, after)
    assert same(weights, [p.detach() for p in plain.parameters()])
    assert len(rates) > 1


# Clipping what is released.


def test_released_gradients_may_be_clipped_before_the_optimizer_uses_them() -> None:
    """A hook on step() that is registered after make_private sees noised gradients: what it does to them is free."""
    model, optimizer, private = fresh()
    before: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: before.append(float(clip_grad_norm_(model.parameters(), 0.01))))
    start = [p.detach().clone() for p in model.parameters()]
    x, y = next(iter(private.loader))
    private.backward(F.cross_entropy(model(x), y, reduction="none"))
    optimizer.step()
    assert before[0] > 0.01
    moved = torch.cat([(p.detach() - s).flatten() for p, s in zip(model.parameters(), start, strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(0.5 * 0.01), rtol=1e-4, atol=0)
    assert private.ledger == _after_one_step()


def test_clipping_after_the_step_changes_nothing_that_was_used() -> None:
    model, optimizer, private = fresh()

    def after() -> None:
        clip_grad_norm_(model.parameters(), 1e-3)

    assert same(train(model, optimizer, private, after), train(*fresh()))


def _after_one_step() -> clipless.Ledger:
    ledger = clipless.Ledger()
    ledger.record(fresh()[2].plan.event(0))
    return ledger


# TensorBoard.


def test_tensorboard_writes_what_is_released(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model, optimizer, private = fresh(clipping="dc-e")
    with SummaryWriter(str(tmp_path)) as writer:

        def after() -> None:
            step = private.ledger.steps
            writer.add_scalar("privacy/epsilon", private.spent().epsilon, step)
            writer.add_scalar("privacy/threshold", float(private.thresholds), step)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                writer.add_histogram(f"gradients/{name}", parameter.grad, step)

        weights = train(model, optimizer, private, after)
    assert same(weights, train(*fresh(clipping="dc-e")))
    events = EventAccumulator(str(tmp_path), {"histograms": 0}).Reload()
    written = [event.value for event in events.Scalars("privacy/epsilon")]
    assert written == sorted(written)
    assert written[-1] == pytest.approx(private.spent().epsilon)
    assert len(events.Histograms("gradients/0.weight")) == STEPS


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_draws_the_graph_of_a_copy(tmp_path: Path) -> None:
    """Tracing runs the model; a copy of a private model is a plain one."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    model, optimizer, private = fresh()
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_graph(copy.deepcopy(model), dataset().tensors[0][:2])
    assert same(train(model, optimizer, private), train(*fresh()))
