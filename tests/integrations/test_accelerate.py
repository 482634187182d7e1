"""Accelerate: the same run as the plain loop, on what an Accelerator prepares."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DynamoBackend
from torch import nn

import clipless
import small_run
from clipless.integrations.accelerate import _refuse, prepare_private, send_to_device

PRIVACY = clipless.Privacy(noise_multiplier=1.0, delta=1e-5, accountant="rdp", seed=5)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate shares its state over a process, with a Trainer that accumulates gradients too."""
    _reset()
    yield
    _reset()


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def problem() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Tanh(), nn.Linear(7, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("form", ["private.step", "private.backward", "accelerator.backward"])
def test_three_steps_are_those_of_the_plain_loop_bit_for_bit(form: str) -> None:
    reduction = "mean" if form == "accelerator.backward" else None
    plan = {"batch_size": 12, "steps": 3, "loss_reduction": reduction}
    model, optimizer = problem()
    private = clipless.make_private(model, optimizer, small_run.dataset(), **PRIVACY.arguments(), **plan)  # type: ignore[arg-type]
    torch.manual_seed(2)
    for x, y in private.loader:
        if reduction is None:
            private.backward(losses(model, x, y))
        else:
            losses(model, x, y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    accelerator = Accelerator(cpu=True)
    other, plain = problem()
    prepared = prepare_private(accelerator, other, plain, small_run.dataset(), privacy=PRIVACY, **plan)  # type: ignore[arg-type]

    def record_losses(model: nn.Module, batch: Any) -> torch.Tensor:
        return losses(model, *send_to_device(batch, accelerator.device))

    torch.manual_seed(2)
    for batch in prepared.private.loader:
        if form == "private.step":
            prepared.private.step(record_losses, batch)
        else:
            found = record_losses(prepared.model, batch)
            if form == "private.backward":
                prepared.private.backward(found)
            else:
                accelerator.backward(found.mean())
            assert all(p.grad is None for p in other.parameters())
            prepared.optimizer.step()
        assert all(p.grad is not None for p in other.parameters())
        prepared.optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert prepared.private.ledger.to_dict() == private.ledger.to_dict()


@pytest.mark.parametrize("outside", [False, True])
def test_bfloat16_within_the_function(outside: bool) -> None:
    """The prepared model turns autocast on by itself; the function may turn it on, too."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, _, private = prepare_private(
        accelerator, *problem(), small_run.dataset(), privacy=PRIVACY, batch_size=12, steps=3
    )

    def record_losses(model: nn.Module, batch: Any) -> torch.Tensor:
        with accelerator.autocast() if outside else nullcontext():
            return losses(model, *batch)

    for batch in private.loader:
        private.step(record_losses, batch)
    assert private.spent().steps == 3
    assert model(next(iter(small_run.dataset()))[0]).dtype is torch.float32


def test_bfloat16_under_autocast() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer, private = prepare_private(
        accelerator, *problem(), small_run.dataset(), privacy=PRIVACY, batch_size=12, steps=3
    )
    for x, y in private.loader:
        with accelerator.autocast():
            found = losses(model, x, y)
        private.backward(found)
        optimizer.step()
        optimizer.zero_grad()
    assert private.spent().steps == 3


def test_the_loader_may_be_prepared_and_stays_as_it_is() -> None:
    accelerator = Accelerator(cpu=True)
    prepared = prepare_private(accelerator, *problem(), small_run.dataset(), privacy=PRIVACY, batch_size=12, steps=3)
    assert accelerator.prepare(prepared.private.loader) is prepared.private.loader


def test_an_accelerated_optimizer_is_answered_with_the_one_inside() -> None:
    model, optimizer = Accelerator(cpu=True).prepare(*problem())
    with pytest.raises(clipless.InvalidType, match=r"optimizer\.optimizer"):
        clipless.make_private(model, optimizer, small_run.dataset(), epsilon=3.0, batch_size=12, epochs=1)


def test_accumulation_is_refused_before_anything_is_changed() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(clipless.InvalidArgument, match="microbatches"):
        prepare_private(accelerator, *problem(), small_run.dataset(), privacy=PRIVACY, batch_size=12, steps=3)
    with pytest.raises(clipless.InvalidType, match=r"clipless\.Privacy"):
        prepare_private(accelerator, *problem(), small_run.dataset(), privacy=3.0, batch_size=12, steps=3)  # type: ignore[arg-type]


SETTINGS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"mixed_precision": "fp16"}, {}, "bf16"),
    ({}, {"deepspeed_plugin": object()}, "DeepSpeed"),
    ({}, {"fsdp_plugin": object()}, "fully_shard"),
    ({}, {"dynamo_plugin": SimpleNamespace(backend=DynamoBackend.INDUCTOR)}, "compiles"),
]


@pytest.mark.parametrize(("given", "of_state", "reason"), SETTINGS, ids=[reason for *_, reason in SETTINGS])
def test_an_accelerator_that_breaks_the_promise_is_refused(
    given: dict[str, Any], of_state: dict[str, Any], reason: str
) -> None:
    """Accelerators that this machine cannot make, by what is read of them."""
    state = SimpleNamespace(**{"dynamo_plugin": SimpleNamespace(backend=DynamoBackend.NO), **of_state})
    plain = {"mixed_precision": "no", "gradient_accumulation_steps": 1, "state": state}
    with pytest.raises(clipless.InvalidArgument, match=reason):
        _refuse(SimpleNamespace(**{**plain, **given}))
