"""One part of a batch through the engine with the checks that a run makes of itself."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clipless.gradients import Engine, Kernels
from clipless.partition import partition

MODES = {"losses": True, "loss": False}


def everything(norms: Tensor, groups: Sequence[int]) -> Tensor:
    return torch.ones_like(norms)


def self_checked(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, records: int, per_record: bool
) -> dict[str, Tensor]:
    """The sums without clipping, after both checks, as `private.backward` or `loss.backward()` on a sum makes them."""
    with _attached(model) as engine:
        engine.open(records, averaged=False)
        losses = loss_fn(model, batch)
        engine.backward(losses) if per_record else losses.sum().backward()
        assert engine.refuse_unsound() == (records > 0), "no pass was checked"
        return engine.complete()


def step_checked(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, records: int
) -> dict[str, Tensor]:
    """The sums without clipping, after the checks of the whole function, as `private.step` makes them."""
    with _attached(model) as engine:
        engine.open(records, averaged=None)
        engine.run(loss_fn, batch, None)
        engine.refuse_unsound()
        return engine.complete()


@contextmanager
def _attached(model: nn.Module) -> Iterator[Engine]:
    groups = partition("flat", [name for name, p in model.named_parameters() if p.requires_grad])
    engine = Engine(model, groups, everything, lambda norms: None, Kernels(), checks_itself=True)
    engine.attach()
    try:
        yield engine
    finally:
        engine.detach()
