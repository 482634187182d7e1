"""What each parameter's share of the clipped sum costs: the seconds of its rules, norms and sum, and the bytes held."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from clipless.grads.engine import LossFunction, per_record_losses
from clipless.grads.frames import Part
from clipless.grads.pieces import Piece, combine
from clipless.grads.rules import LayerRule
from clipless.grads.shared import Crossing
from clipless.grads.tap import Call
from clipless.grads.tape import Tape

Result = TypeVar("Result")
REPEATS = 3
BY_OPERATION = "by operation"


@dataclass
class Cost:
    """Of one parameter: the rules that made its pieces, their seconds, and the bytes that the pieces hold.

    A buffer that several parameters hold, such as the input of three projections, counts for each of them.
    """

    rules: dict[str, None] = field(default_factory=dict)
    seconds: float = 0.0
    bytes: int = 0
    half: bool = False


def measure(model: nn.Module, loss_fn: LossFunction, batch: Any, records: int) -> dict[str, Cost]:
    """The cost of every parameter that the batch reaches, the fastest of a few passes. The model is left as it was."""
    passes = []
    for _ in range(REPEATS):
        meter = _Meter(model)
        meter.attach()
        try:
            meter.open(Part(records))
            per_record_losses(loss_fn, model, batch, records).sum().backward()
        finally:
            meter.detach()
        passes.append(meter.costs)
    for name, cost in passes[-1].items():
        cost.seconds = min(one[name].seconds for one in passes if name in one)
    return passes[-1]


class _Meter(Tape):
    """A tape with a clock where gradients arrive. A call's seconds are divided among its parameters by their size."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, self._finish)
        self.costs: dict[str, Cost] = {}
        self._asynchronous = any(p.device.type != "cpu" for p in self.parameters.values())

    def _receive(self, call: Call, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        _, seconds = self._clocked(lambda: super(_Meter, self)._receive(call, tensors, grads))
        self._note(list(call.wanted.values()), rule_name(self.rules[call.name]), seconds, grads)

    def _receive_crossing(self, crossing: Crossing, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        _, seconds = self._clocked(lambda: super(_Meter, self)._receive_crossing(crossing, tensors, grads))
        names = dict.fromkeys(root.name for shared in crossing.shared for root in shared.roots)
        self._note(list(names), BY_OPERATION, seconds, grads)

    def _note(self, names: list[str], rule: str, seconds: float, grads: tuple[Tensor, ...]) -> None:
        size = max(sum(self.parameters[name].numel() for name in names), 1)
        for name in names:
            cost = self.costs.setdefault(name, Cost())
            cost.rules.setdefault(rule)
            cost.seconds += seconds * self.parameters[name].numel() / size
            cost.half |= any(grad.dtype.itemsize < torch.float32.itemsize for grad in grads)

    def _finish(self, part: Part) -> None:
        for name, uses in part.pieces.items():
            total, seconds = self._clocked(lambda uses=uses: _norms_and_sum(uses, part.records))  # type: ignore[misc]
            cost = self.costs.setdefault(name, Cost())
            cost.seconds += seconds
            cost.bytes = held_bytes([*uses, total])

    def _clocked(self, work: Callable[[], Result]) -> tuple[Result, float]:
        self._wait()
        begin = time.perf_counter()
        result = work()
        self._wait()
        return result, time.perf_counter() - begin

    def _wait(self) -> None:
        if self._asynchronous:
            torch.accelerator.synchronize()


def rule_name(rule: LayerRule) -> str:
    """A rule's name for people."""
    return str(getattr(rule, "__name__", type(rule).__name__)).strip("_").replace("_", " ")


def held_bytes(thing: object) -> int:
    """Bytes of the memory behind all tensors in a structure of pieces, lists and mappings, each storage once."""
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
    return {pointer: size for part in inside for pointer, size in _storages(part, seen).items()}


def _norms_and_sum(uses: list[Piece], records: int) -> Piece:
    total = combine(uses)
    total.weighted_sum(torch.ones(records, dtype=total.sq_norms.dtype, device=total.sq_norms.device))
    return total
