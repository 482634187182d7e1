"""Modules whose forward is running: what was changed for its duration, and how it is undone."""

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from clipless.gradients.capture.layout import Place
from clipless.gradients.capture.messages import draws_at_random
from clipless.gradients.capture.micro_batch import MicroBatch
from clipless.gradients.capture.model_map import Layer, ModelMap
from clipless.gradients.capture.patterns import CallPattern
from clipless.gradients.capture.traced import Operations, Traced, root
from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.recurrent.takeover import Takeover
from clipless.gradients.trees import Dims
from clipless.random_state import RandomState, random_state_of, same_random_state


@dataclass(slots=True)
class Frame:
    """A call of a module that has not returned.

    `armed`: autograd records it; `inside`: it or an enclosing call is armed. `dims` and `out_dims`: where the records lie in
    its inputs and outputs; `unsure`: this is known from sizes alone. `has_rows`: its rows are not the records, and `rows` is
    their number; inputs that are `by_record` have a slice for each record even so. `along`: input and output are single
    tensors with the records along this dimension. `stand_in`: it is the outermost call, and the input of an empty batch was
    replaced. `turned_off`: its frozen parameters. `replaced`: the parameters that traced tensors replace; `lent`: the traced
    tensors that parameters replace again inside the call.
    """

    layer: Layer
    place: Place
    armed: bool = False
    inside: bool = False
    stand_in: bool = False
    dims: Dims = ()
    out_dims: Dims = ()
    unsure: bool = False
    has_rows: bool = False
    rows: int = 0
    by_record: tuple[bool, ...] = ()
    along: int | None = None
    turned_off: list[nn.Parameter] = field(default_factory=list)
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list)
    lent: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    takeover: Takeover | None = None
    random_state: RandomState | None = None

    def trace_parameters(self, operations: Operations) -> None:
        """Replace the module's own parameters by traced tensors while it runs."""
        for path, name in self.layer.own.items():
            self._replace(self.layer, path, name, operations)

    @property
    def is_swapped(self) -> bool:
        """Whether other tensors are in the place of the module's parameters, as inside `functional_call`."""
        return any(not _is_parameter(self.layer.held(path)) for path in self.layer.own)

    def _replace(self, layer: Layer, path: str, name: str, operations: Operations) -> None:
        prefix, _, local = path.rpartition(".")
        holder = layer.module.get_submodule(prefix)
        parameter = holder._parameters[local]
        if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
            holder._parameters[local] = root(name, layer.name, parameter, operations)  # type: ignore[assignment]
            self.replaced.append((holder, local, parameter))

    def handle_strays(
        self, pattern: CallPattern, model: ModelMap, outermost: MicroBatch | None, operations: Operations
    ) -> None:
        """Replace the parameters that are used outside their module's forward by traced tensors, except during that forward.
        Without records, freeze them. `outermost` is the open micro-batch in the outermost call, else None."""
        if outermost is not None and outermost.records:
            self.trace_strays(model, pattern.strays, operations)
        elif outermost is not None:
            parameters = model.live
            for name in pattern.strays:
                if parameters[name].requires_grad:
                    parameters[name].requires_grad = False
                    self.turned_off.append(parameters[name])
        if self.layer.name not in pattern.by_operation:
            self.use_own_strays(pattern.strays)

    def trace_strays(self, model: ModelMap, strays: Collection[str], operations: Operations) -> None:
        """Replace these parameters by traced tensors in every module, while the whole model runs."""
        for layer in model.layers.values():
            for path, name in layer.own.items():
                if name in strays:
                    self._replace(layer, path, name, operations)

    def use_own_strays(self, strays: Collection[str]) -> None:
        """Give the module its own parameters back while it runs; the rest of the model keeps the traced tensors."""
        for path, name in self.layer.own.items():
            prefix, _, local = path.rpartition(".")
            holder = self.layer.module.get_submodule(prefix)
            traced: Tensor | None = holder._parameters[local]
            if name in strays and isinstance(traced, Traced) and traced.parameter is not None:
                holder._parameters[local] = traced.parameter
                self.lent.append((holder, local, traced))

    def put_back(self) -> None:
        """Unfreeze and restore the parameters that were frozen or replaced."""
        if self.takeover is not None:
            self.takeover.end()
        for parameter in self.turned_off:
            parameter.requires_grad = True
        for holder, local, traced in self.lent:
            holder._parameters[local] = traced  # type: ignore[assignment]
        for holder, local, parameter in self.replaced:
            holder._parameters[local] = parameter

    def refuse_random(self) -> None:
        """Raise if the module has drawn random numbers: recomputed record by record, it would not give the same output."""
        before = self.random_state
        if before is not None and not same_random_state(before, random_state_of(before.cuda, ())):
            raise draws_at_random(self.layer.name)


def _is_parameter(tensor: Tensor | None) -> bool:
    """Whether it is a parameter, or a traced tensor that stands for one."""
    if isinstance(tensor, Traced):
        return tensor.parameter is not None
    return tensor is None or isinstance(tensor, nn.Parameter)


@dataclass
class OperationCounter:
    """Numbers the operations with traced tensors of one forward pass."""

    _counts: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def place(self, owner: str, inside: Place) -> Place:
        """The place of the operands of the next operation with parameters of `owner` in that call."""
        key = (owner, inside.name, inside.call)
        self._counts[key] = self._counts.get(key, 0) + 1
        return Place(owner, inside.call, "operand", self._counts[key], inside.name)


@dataclass
class CurrentPass:
    """What is known of the forward pass that is running: its pattern, the modules that it is in (`frames`), and how often
    each has been called.

    Taps hang on `anchor`. Without a `forward_pass` a part of the model is being computed again, in the backward pass.
    """

    pattern: CallPattern
    forward_pass: ForwardPass | None = None
    anchor: Tensor = field(default_factory=partial(torch.zeros, (), requires_grad=True))
    frames: list[Frame] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    operations: OperationCounter = field(default_factory=OperationCounter)

    def route(self, micro: MicroBatch) -> None:
        """Note that the micro-batch has rows that are not its records."""
        micro.routed = True
        if self.forward_pass is not None:
            self.forward_pass.routed = True


def unseen_by_checkpoints() -> AbstractContextManager[Any]:
    """Hide from a checkpoint around the model what autograd saves inside."""
    return saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)
