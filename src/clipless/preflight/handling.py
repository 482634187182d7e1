"""Which layer rules handle each parameter, seen in one forward and backward pass."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clipless.clipped import LossFunction
from clipless.gradients.capture.calls import Call
from clipless.gradients.capture.crossing import Crossing
from clipless.gradients.capture.receiver import Receiver
from clipless.gradients.clipped_sum import per_record_losses
from clipless.gradients.engine import Engine
from clipless.gradients.kernels import Kernels
from clipless.gradients.layers import LayerRule, generic, rule_of
from clipless.partition import partition

BY_OPERATION = "by operation"


@dataclass
class HandledBy:
    """How one parameter was handled: the names of its rules, in the order in which gradients arrived, and whether any of
    these gradients was in half precision."""

    rules: dict[str, None] = field(default_factory=dict)
    half: bool = False


def observe_rules(model: nn.Module, loss_fn: LossFunction, batch: Any, records: int) -> dict[str, HandledBy]:
    """How the engine handles every parameter that the batch reaches. The model is left unchanged."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    engine = Engine(model, partition("flat", names), _everything, _nothing, Kernels(), receiver=_NotingReceiver)
    engine.attach()
    try:
        engine.open(records, averaged=False, by_function=True)
        per_record_losses(loss_fn, model, batch, records).sum().backward()
    finally:
        engine.detach()
    receiver = engine.receiver
    assert isinstance(receiver, _NotingReceiver)
    return receiver.found


def registered(model: nn.Module) -> dict[str, str]:
    """How every parameter would be handled by the registry of rules, for a model that was refused before it ran."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rules: dict[str, dict[str, None]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            rules.setdefault(names[id(parameter)], {}).setdefault(rule_name(rule_of(module) or generic))
    return {name: " + ".join(found) for name, found in rules.items()}


def rule_name(rule: LayerRule) -> str:
    """A readable name of a rule.

    >>> rule_name(rule_of(nn.LayerNorm(3)))
    'layer norm'
    """
    return str(getattr(rule, "__name__", type(rule).__name__)).strip("_").replace("_", " ")


def _everything(norms: Tensor, groups: Sequence[int]) -> Tensor:
    return torch.ones_like(norms)


def _nothing(norms: Tensor) -> None:
    """Ignores the norms."""


class _NotingReceiver(Receiver):
    """A receiver that also records the rule of every gradient."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.found: dict[str, HandledBy] = {}

    def call(self, call: Call, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        super().call(call, tensors, grads)
        self._note(call.wanted.values(), rule_name(call.layer.rule), grads)

    def crossing(self, crossing: Crossing, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        super().crossing(crossing, tensors, grads)
        self._note((root.name for traced in crossing.traced for root in traced.roots), BY_OPERATION, grads)

    def _note(self, names: Iterable[str], rule: str, grads: tuple[Tensor, ...]) -> None:
        half = any(grad.dtype.itemsize < torch.float32.itemsize for grad in grads)
        for name in names:
            handled = self.found.setdefault(name, HandledBy())
            handled.rules.setdefault(rule)
            handled.half |= half
