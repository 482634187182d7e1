"""What each parameter's share of the clipped sum costs: the seconds of its rules, norms and sum, and the bytes held."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clipless.grads.clipped_sum import LossFunction, per_record_losses
from clipless.grads.frames import Part
from clipless.grads.pieces import Piece, combine, formed, weighted_sum
from clipless.grads.receiver import Receiver
from clipless.grads.rules import LayerRule
from clipless.grads.shared import Crossing
from clipless.grads.tap import Call
from clipless.grads.tape import Tape
from clipless.grads.tuner import Tuner

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
        meter = _Meter({name: p for name, p in model.named_parameters() if p.requires_grad})
        tape = Tape(model, meter)
        tape.attach()
        try:
            tape.open(Part(records))
            per_record_losses(loss_fn, model, batch, records).sum().backward()
        finally:
            tape.detach()
        passes.append(meter.costs)
    for name, cost in passes[-1].items():
        cost.seconds = min(one[name].seconds for one in passes if name in one)
    return passes[-1]


class _Meter(Receiver):
    """A receiver with a clock. A call's seconds are divided among its parameters by their size."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(self._norms_and_sum, lambda part: None)
        self.costs: dict[str, Cost] = {}
        self._parameters = parameters
        self._tuner = Tuner()
        self._asynchronous = any(p.device.type != "cpu" for p in parameters.values())

    def call(self, call: Call, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        seconds = self._clocked(lambda: super(_Meter, self).call(call, tensors, grads))
        self._note(list(call.wanted.values()), rule_name(self.rules[call.owner]), seconds, grads)

    def crossing(self, crossing: Crossing, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        seconds = self._clocked(lambda: super(_Meter, self).crossing(crossing, tensors, grads))
        names = dict.fromkeys(root.name for shared in crossing.shared for root in shared.roots)
        self._note(list(names), BY_OPERATION, seconds, grads)

    def _note(self, names: list[str], rule: str, seconds: float, grads: tuple[Tensor, ...]) -> None:
        size = max(sum(self._parameters[name].numel() for name in names), 1)
        for name in names:
            cost = self.costs.setdefault(name, Cost())
            cost.rules.setdefault(rule)
            cost.seconds += seconds * self._parameters[name].numel() / size
            cost.half |= any(grad.dtype.itemsize < torch.float32.itemsize for grad in grads)

    def _norms_and_sum(self, part: Part, name: str, uses: list[Piece]) -> None:
        piece = combine(uses)
        piece = formed(piece, self._tuner.choose(piece, self._parameters[name]).way)
        weighted_sum(piece, torch.ones_like(piece.sq_norms), like=self._parameters[name])
        self.costs.setdefault(name, Cost()).bytes = held_bytes(piece)

    def _clocked(self, work: Callable[[], None]) -> float:
        self._wait()
        begin = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - begin

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
