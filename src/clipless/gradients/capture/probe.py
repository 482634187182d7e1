"""Probes: forward passes on other numbers of records, of which only shapes are kept."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipless.gradients.capture import messages
from clipless.gradients.capture.crossing import Crossing
from clipless.gradients.capture.dependence import RecordDependence
from clipless.gradients.capture.frames import Frame, OperationCounter, unseen_by_checkpoints
from clipless.gradients.capture.hooks import Hooks
from clipless.gradients.capture.layout import Place, dims_by_size, signature
from clipless.gradients.capture.model_map import Layer, ModelMap
from clipless.gradients.capture.patterns import CallPattern
from clipless.gradients.capture.refusals import refuse_module
from clipless.gradients.capture.rows import Located, is_single, rows_of_operation
from clipless.gradients.capture.traced import Traced, located_shapes
from clipless.gradients.capture.transforms import TransformsSeen, transformed
from clipless.gradients.capture.watch import StateWatch
from clipless.gradients.checks.records import leaves_of
from clipless.gradients.moving_buffers import buffers_kept, may_count
from clipless.gradients.records import (
    Reading,
    is_square,
    needed_records,
    readings,
    resized,
    unused_primes,
    unused_sizes,
)
from clipless.gradients.shards import Shards
from clipless.gradients.trees import Shapes, differentiable, opened, plain_tensors, shapes_of
from clipless.random_state import random_state_kept
from clipless.torch_internals import pytree


class LearnedPatterns:
    """The patterns in which the model has been called so far."""

    def __init__(self, model: ModelMap, hooks: Hooks, watch: StateWatch, shards: Shards | None = None) -> None:
        self._model, self._hooks, self._watch, self._rules = model, hooks, watch, model.rules
        self._shards = shards
        self._patterns: dict[object, CallPattern] = {}

    def knows(self, layer: Layer, inputs: tuple[Any, Any]) -> bool:
        """Whether the pattern of such a call has been learned."""
        pattern = self._patterns.get(signature(layer.module, inputs))
        return pattern is not None and pattern.learned

    def find(self, layer: Layer, inputs: tuple[Any, Any], records: int) -> CallPattern:
        """The pattern of a call of the outermost module. A new one is learned by probes; raises if that fails."""
        messages.refuse_unfit_inputs(layer.name, inputs, records)
        pattern = self._patterns.setdefault(signature(layer.module, inputs), CallPattern(self._rules))
        square = is_square(inputs, records)
        if not pattern.learned:
            learn_pattern(pattern, self._model, self._hooks, self._watch, layer.module, inputs, records)
            self._watch.refuse_writes(records)
            self._refuse_inner_strays(pattern)
            pattern.square = square
            tensors = plain_tensors(inputs)
            if tensors is not None and len(tensors) == 1 and pattern.reading == {0: 0}:
                pattern.single_input = (id(layer.module), layer.module.training, tensors[0].dim())
        pattern.square &= square
        return pattern

    def _refuse_inner_strays(self, pattern: CallPattern) -> None:
        """Raise if a parameter is used outside its module's forward, where it is sharded."""
        inner = set() if self._shards is None else set(pattern.strays) - set(self._shards.outer)
        if inner:
            pattern.forget()
            raise messages.stray_shard(min(inner))


def learn_pattern(
    pattern: CallPattern,
    model: ModelMap,
    hooks: Hooks,
    watch: StateWatch,
    module: nn.Module,
    inputs: tuple[Any, Any],
    records: int,
) -> None:
    """Find out by probes where the records lie when the module is called like this; raises if that fails."""
    found = list(readings(inputs, records))
    needed = needed_records(inputs, found[0]) if found else []

    def run(reading: Reading, size: int) -> None:
        Probe(pattern, model, watch, size).run(hooks, module, resized(inputs, reading, size, needed), reading)

    sizes = unused_sizes(inputs, module, records, len(needed))
    if not pattern.learn(run, found, sizes, partial(unused_primes, inputs, module, records, len(needed))):
        # If the model itself fails on this batch, the user sees its own error.
        Probe(pattern, model, watch, records).run(hooks, module, inputs)
        raise pattern.refusal()


class Probe:
    """A forward pass on `size` records."""

    def __init__(self, pattern: CallPattern, model: ModelMap, watch: StateWatch, size: int) -> None:
        self._pattern, self._model, self._watch, self._size = pattern, model, watch, size
        self._frames: list[Frame] = []
        self._calls: dict[str, int] = {}
        self._operations = OperationCounter()
        self._anchor = torch.zeros((), requires_grad=True)
        self._dependence = RecordDependence(())

    def run(self, hooks: Hooks, module: nn.Module, inputs: tuple[Any, Any], reading: Reading | None = None) -> None:
        """Run the module on these inputs, whose records lie as in `reading`. Random state and parameters are restored."""
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self._dependence = RecordDependence(tensors[k] for k in reading or {})
        listener, hooks.listener = hooks.listener, self
        self._pattern.layout.begin_pass(self._size)
        try:
            with random_state_kept(module), buffers_kept(self._model.modules), unseen_by_checkpoints():
                with TransformsSeen(self._transformed), self._dependence:
                    output = module(*inputs[0], **inputs[1])
                self._dependent_buffers()
            self._find_strays(output)
        except RuntimeError as trouble:
            if "saved tensor hooks" in str(trouble):  # torch.func.grad and the like do not run under any
                raise messages.transformed(self._frames[-1].layer.name if self._frames else "(model)") from trouble
            raise
        finally:
            hooks.listener = listener
            while self._frames:
                self._frames.pop().put_back()

    def _dependent_buffers(self) -> None:
        """Note the single numbers in buffers that were computed from the records: these count no calls."""
        for module, layer in self._model.layers.items():
            for name, buffer in module._buffers.items():
                if buffer is not None and may_count(buffer) and self._dependence.computed(buffer):
                    self._watch.counters.dependent.add(name if layer.name == "(model)" else f"{layer.name}.{name}")

    def approach(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A probe changes nothing."""

    def enter(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the shapes of a module's inputs."""
        refuse_module(layer.module, layer.name)
        if layer.own and transformed():
            raise messages.transformed(layer.name)
        if layer.own:
            messages.refuse_nested(layer.name, (args, kwargs))
        self._calls[layer.name] = self._calls.get(layer.name, 0) + 1
        frame = Frame(layer, Place(layer.name, self._calls[layer.name]))
        self._frames.append(frame)
        self._note_input(frame.place, shapes_of((args, kwargs)), (args, kwargs))
        if len(self._frames) == 1 and self._pattern.strays:
            frame.trace_strays(self._model, self._pattern.strays, self)
        if layer.own and frame.is_swapped:
            self._pattern.layout.swapped.add(layer.name)
        if layer.name in self._pattern.by_operation:
            frame.trace_parameters(self)
            return
        if self._pattern.strays:
            frame.use_own_strays(self._pattern.strays)
        for parameter in layer.live:
            if parameter.requires_grad:
                parameter.requires_grad = False
                frame.turned_off.append(parameter)

    def leave(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Record the shapes of a module's outputs. Returns the output, connected to the anchor in autograd's graph."""
        if not self._frames or self._frames[-1].layer is not layer:
            return None
        frame = self._frames.pop()
        frame.put_back()
        self._pattern.layout.note(frame.place.output(), shapes_of(opened(output), floating=True))
        if not frame.turned_off or not torch.is_grad_enabled():
            return None
        return pytree.tree_map(self._anchored, output)

    def _note_input(self, place: Place, shapes: Shapes, values: Any) -> None:
        layout = self._pattern.layout
        layout.note(place, shapes, self._dependence.depends(values))
        if self._dependence.reordered(values):
            layout.reordered.add(place.name)

    def _anchored(self, leaf: Any) -> Any:
        plain = isinstance(leaf, Tensor) and leaf.is_floating_point() and not isinstance(leaf, Traced)
        return leaf + self._anchor.to(leaf) if plain else leaf

    def _find_strays(self, output: Any) -> None:
        """Record the parameters that the output depends on outside their modules' own forward, where they are frozen."""
        tensors = [tensor for tensor in differentiable(output) if not isinstance(tensor, Traced)]
        leaves = [*leaves_of(tensors), *tensors]
        names = {id(parameter): name for name, parameter in self._model.live.items()}
        self._pattern.layout.strays |= {names[id(leaf)] for leaf in leaves if id(leaf) in names and leaf.requires_grad}

    def locate(self, owner: str, operands: list[Any], results: list[Tensor]) -> Located:
        """Record the shapes of an operation. Returns where the records lie, judged by size."""
        inside = self._frames[-1].place if self._frames else Place("", 0)
        place = self._operations.place(owner, inside)
        shapes, result_shapes = located_shapes(operands, results)
        self._note_input(place, shapes, operands)
        self._find_strays([operand for operand in operands if isinstance(operand, Tensor)])
        self._pattern.layout.note(place._replace(side="result"), result_shapes)
        if owner in self._pattern.routed:
            if is_single(operands):
                self._pattern.layout.give_up(owner)
            return rows_of_operation(operands, results)
        multiples = self._pattern.multiples
        dims, out_dims = (dims_by_size(some, self._size, multiples) for some in (shapes, result_shapes))
        return Located(dims, out_dims)

    def tap(self, crossing: Crossing, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        """Returns the outputs as they are: nothing is tapped in a probe."""
        return tuple(outputs)

    def give_up(self, owner: str, operation: str) -> None:
        """Handle the module as a whole."""
        self._pattern.layout.give_up(owner)

    def _transformed(self, tensor: Traced) -> None:
        """Handle a module as a whole that uses its parameters in a transform of torch.func; refuse others' parameters."""
        owner = tensor.roots[0].owner
        if any(root.name in self._pattern.strays for root in tensor.roots):
            raise messages.transformed(owner)
        self._pattern.layout.give_up(owner)
