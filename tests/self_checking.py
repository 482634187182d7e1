"""One part of a batch through the engine with the checks that a run makes of itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clipless.grads import Engine, Tuner
from clipless.partition import partition

MODES = {"losses": True, "loss": False}


def self_checked(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, records: int, per_record: bool
) -> dict[str, Tensor]:
    """The sums without clipping, after both checks, as `private.backward` or `loss.backward()` on a sum makes them."""
    groups = partition("flat", [name for name, p in model.named_parameters() if p.requires_grad])
    engine = Engine(model, groups, lambda norms, groups: torch.ones_like(norms), lambda norms: None, Tuner())
    engine.tape.self_check.active = True
    engine.tape.attach()
    try:
        engine.open(records, 1.0)
        losses = loss_fn(model, batch)
        engine.backward(losses) if per_record else losses.sum().backward()
        checked = len(engine._checked)
        engine.refuse_unsound()
        assert checked == (records > 0), "no pass was checked"
        return dict(engine.sums)
    finally:
        engine.tape.detach()
