"""The recorder: what happens around each module while the model runs on an open micro-batch.

Around a module with trainable parameters of its own it turns `requires_grad` of those parameters off, so that autograd
computes no weight gradient, and puts a tap on the module's output. A module without a rule has its parameters replaced by
traced tensors while it runs, and the operations in which these meet the records are tapped.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from clipless.errors import UnsupportedModule
from clipless.gradients.capture import messages
from clipless.gradients.capture.calls import Call
from clipless.gradients.capture.crossing import Crossing
from clipless.gradients.capture.frames import Frame, OperationCounter
from clipless.gradients.capture.hooks import Hooks, Tap
from clipless.gradients.capture.layout import Place, signature
from clipless.gradients.capture.micro_batch import MicroBatch
from clipless.gradients.capture.model_map import Layer, ModelMap
from clipless.gradients.capture.patterns import CallPattern
from clipless.gradients.capture.probe import learn_pattern
from clipless.gradients.capture.receiver import TRAINING, Receiver
from clipless.gradients.capture.refusals import refuse_module
from clipless.gradients.capture.rows import Located, is_single, rows_of_call, rows_of_operation, rows_of_results
from clipless.gradients.capture.stand_ins import StandIns
from clipless.gradients.capture.traced import located_shapes, refuse_mixing
from clipless.gradients.capture.watch import StateWatch, StructureWatch
from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.checks.self_check import SelfCheck
from clipless.gradients.randomness import cuda_devices, random_state_of, same_random_state
from clipless.gradients.records import broken_records, is_square, resized
from clipless.gradients.recurrent.takeover import take_over
from clipless.gradients.shards import Shards
from clipless.gradients.trees import Shapes, closed, differentiable, opened, plain_tensors, shapes_of


class Recorder:
    """Listens to the hooks, and taps what modules compute for the receiver's open micro-batch.

    Taps hang on the anchor of the forward pass, or on a spare one where a part of the model is computed again. If it
    `looks_at_data`, the micro-batch is told which records' data are not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: ModelMap,
        hooks: Hooks,
        receiver: Receiver,
        self_check: SelfCheck,
        watch: StateWatch,
        shards: Shards | None = None,
    ) -> None:
        self.looks_at_data = False
        self._map, self._hooks, self._receiver, self._self_check = layers, hooks, receiver, self_check
        self._modules, self._rules = layers.modules, layers.rules
        self._structure, self._watch, self._shards = StructureWatch(model, layers.sharded), watch, shards
        self._stand_ins = StandIns(hooks)
        self._patterns: dict[object, CallPattern] = {}
        self._pattern = CallPattern(self._rules)
        self._frames: list[Frame] = []
        self._calls: dict[str, int] = {}
        self._operations = OperationCounter()
        self._stands_in = False
        self._entered: tuple[MicroBatch | None, Layer | None] = None, None
        self._forward_pass: ForwardPass | None = None
        self._spare_anchor = torch.zeros((), requires_grad=True)
        self._anchor = self._spare_anchor

    def attach(self) -> None:
        """Note the model's structure, which must stay."""
        self._structure.open()

    def restore(self) -> None:
        """Put back what an interrupted forward pass has left turned off or replaced."""
        while self._frames:
            self._frames.pop().put_back()

    # Around each module.

    def approach(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a sharded model's parameters are put together for its forward, which probes must not interrupt."""
        if self._receiver.micro is None or not torch.is_grad_enabled() or _recomputing():
            return None
        self.restore()
        changed = self._enter_model(layer, args, kwargs)
        self._stands_in = changed is not None
        return changed

    def enter(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a module's forward."""
        if layer.suspect:
            refuse_module(layer.module, layer.name)
        frames = self._frames
        if frames and frames[0].layer is layer:
            self.restore()  # an earlier pass was interrupted where torch calls no hooks
        armed, inside, changed = torch.is_grad_enabled(), bool(frames) and frames[-1].inside, None
        stands_in = False
        if armed and not inside and self._receiver.micro is not None:
            if self._shards is None or _recomputing():
                changed = self._enter_model(layer, args, kwargs)
                args, kwargs = changed or (args, kwargs)
                stands_in = changed is not None
            elif layer.module is self._shards.root:
                stands_in = self._stands_in
            else:
                raise messages.inside_shards(layer.name)
        number = self._calls[layer.name] = self._calls.get(layer.name, 0) + 1
        frame = Frame(layer, Place(layer.name, number), armed, armed or inside, stands_in)
        frames.append(frame)
        if self._pattern.strays and armed:
            self._handle_strays(frame, outermost=not inside)
        if armed and layer.own:
            self._arm(frame, args, kwargs)
        return changed

    def leave(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After a module's forward."""
        frames = self._frames
        if not frames or frames[-1].layer is not layer:
            return None
        frame = frames.pop()
        if frame.replaced or frame.lent or frame.takeover is not None:
            frame.put_back()
        for parameter in frame.turned_off:
            parameter.requires_grad = True
        if not frame.armed or output is None:
            return None
        plain = isinstance(output, Tensor)
        output = output if plain else opened(output)
        if frame.turned_off:
            output = self._tapped(frame, args, kwargs, output)
        if not (frames and frames[-1].inside) and self._receiver.micro is not None:
            output = self._leave_model(frame, output, self._receiver.micro)
        return output if plain else closed(output)

    # Around the outermost module.

    def _enter_model(self, layer: Layer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A forward pass begins: find where its records lie. Returns the inputs to take instead for an empty batch: a row
        that no sum will ever see."""
        micro, recomputing = self._receiver.micro, _recomputing()
        assert micro is not None
        if recomputing and self._entered[0] is micro:
            again = micro.records == 0 and self._entered[1] is layer
            return self._stand_ins.inputs(layer.module, (args, kwargs)) if again else None
        if not recomputing and micro.begun and not micro.done:
            micro = self._receiver.restart()
        self._entered, self._hooks.empty = (micro, layer), micro.records == 0
        self._structure.refuse_changes()
        inputs, changed = (args, kwargs), None
        with self._probing(layer, inputs, micro.records):
            if micro.records == 0:
                messages.refuse_unfit_inputs(layer.name, inputs, 0)
                inputs = changed = self._stand_ins.inputs(layer.module, inputs)
            elif not self._same_pattern(layer, args, kwargs, micro.records):
                self._find_pattern(layer, inputs, micro.records)
        self._calls, self._operations = {}, OperationCounter()
        micro.modes = list(map(TRAINING, self._modules))
        pattern = self._pattern
        self._forward_pass = self._self_check.begin(
            layer.module, layer.name, inputs, micro, pattern.reading, pattern.square
        )
        self._anchor = self._forward_pass.anchor
        return changed

    def _probing(self, layer: Layer, inputs: tuple[Any, Any], records: int) -> AbstractContextManager[object]:
        """Where a process of a sharded run has yet to learn how its model is called, all have the whole model: they do not
        run it equally often."""
        shards = self._shards
        if shards is None or shards.whole:
            return nullcontext()
        key = signature(layer.module, inputs)
        known = self._stand_ins.knows(key) if records == 0 else key in self._patterns and self._patterns[key].learned
        return self._whole(shards) if shards.gather_if(not known) else nullcontext()

    @contextmanager
    def _whole(self, shards: Shards) -> Iterator[None]:
        """The model was put together: its parameters are watched as the objects they are then."""
        self._hooks.watch(self._map.live)
        with shards.together("a forward pass"):
            yield

    def _same_pattern(self, layer: Layer, args: Any, kwargs: Any, records: int) -> bool:
        """Whether the model is called with one tensor of floating-point numbers just as in the last pass."""
        before = self._pattern.single_input
        if before is None or len(args) != 1 or kwargs or self._pattern.square or not self._pattern.learned:
            return False
        given = args[0]
        if not isinstance(given, Tensor) or not given.is_floating_point():
            return False
        return before == (id(layer.module), layer.module.training, given.dim()) and given.shape[0] == records

    def _find_pattern(self, layer: Layer, inputs: tuple[Any, Any], records: int) -> None:
        """The pattern of this call, which is learned when it is met for the first time."""
        messages.refuse_unfit_inputs(layer.name, inputs, records)
        key = signature(layer.module, inputs)
        pattern = self._pattern = self._patterns.setdefault(key, CallPattern(self._rules))
        square = is_square(inputs, records)
        if not pattern.learned:
            learn_pattern(pattern, self._map, self._hooks, layer.module, inputs, records)
            self._watch.refuse_pass(records)
            inner = set() if self._shards is None else set(pattern.strays) - set(self._shards.outer)
            if inner:
                pattern.forget()
                raise messages.stray_shard(min(inner))
            pattern.square = square
            tensors = plain_tensors(inputs)
            if tensors is not None and len(tensors) == 1 and pattern.reading == {0: 0}:
                pattern.single_input = (id(layer.module), layer.module.training, tensors[0].dim())
        pattern.square &= square

    def _leave_model(self, frame: Frame, output: Any, micro: MicroBatch) -> Any:
        """A forward pass ends: nothing was written into the model; cut off the row of an empty batch, and tap the
        output of a checked pass."""
        forward_pass, self._forward_pass, self._anchor = self._forward_pass, None, self._spare_anchor
        self._watch.refuse_pass(micro.records)
        checked = forward_pass is not None and micro.records > 0 and self._self_check.wanted(forward_pass, micro)
        if self._shards is not None and not self._shards.whole and not _recomputing():
            self._shards.gather_if(checked)
        if micro.records == 0 and frame.stand_in:
            return resized(output, {k: 0 for k, shape in enumerate(shapes_of(output)) if shape[:1] == (1,)}, 0)
        if not checked or forward_pass is None:
            return output
        shapes = shapes_of(output, floating=True)
        dims = self._pattern.layout.output_dims(frame.place.output(), shapes, micro.records)
        return self._self_check.end(forward_pass, micro, output, dims)

    # Around a module with parameters of its own.

    def _arm(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Turn its parameters off, or replace them by traced tensors."""
        layer, micro = frame.layer, self._receiver.micro
        records = 0 if micro is None else micro.records
        if layer.sharded and any(hasattr(parameter, "device_mesh") for parameter in layer.live):
            raise messages.still_divided(layer.name)
        if records and layer.name in self._pattern.by_operation:
            self._note(frame.place, ())
            frame.trace_parameters(self)
            return
        if records:
            along = self._pattern.single_tensors.get(frame.place)
            given = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else None
            if along is not None and given is not None and given.shape[along : along + 1] == (records,):
                frame.along, frame.dims = along, (along,)
                self._note(frame.place, (given.shape,))
            else:
                self._locate_input(frame, shapes_of((args, kwargs)), records)
            if layer.is_generic:
                frame.random_state = random_state_of(cuda_devices(layer.module), ())
        for parameter in layer.live if layer.sharded else layer.parameters:
            if parameter.requires_grad:
                parameter.requires_grad = False
                frame.turned_off.append(parameter)
        if records and frame.turned_off and layer.is_recurrent:
            frame.takeover = take_over(layer.module)

    def _handle_strays(self, frame: Frame, outermost: bool) -> None:
        """Traced tensors stand for parameters that are used outside their module's forward, except in that forward. They
        are turned off where there are no records."""
        strays, micro = self._pattern.strays, self._receiver.micro
        if outermost and micro is not None and micro.records:
            frame.trace_strays(self._map, strays, self)
        elif outermost and micro is not None:
            parameters = self._map.live
            for name in strays:
                if parameters[name].requires_grad:
                    parameters[name].requires_grad = False
                    frame.turned_off.append(parameters[name])
        if frame.layer.name not in self._pattern.by_operation:
            frame.lend_strays(strays)

    def _note(self, place: Place, shapes: Shapes) -> None:
        """One more step of a forward pass."""
        forward_pass = self._forward_pass
        if forward_pass is not None and not _recomputing():
            forward_pass.steps.add((forward_pass.last, place, *map(len, shapes)))
            forward_pass.last = place.name

    def _locate_input(self, frame: Frame, shapes: Shapes, records: int) -> None:
        self._note(frame.place, shapes)
        dims = self._pattern.layout.dims(frame.place, shapes, records)
        if dims is None and shapes:
            frame.dims, frame.has_rows = self._pattern.layout.row_dims(frame.place, shapes), True
            return
        frame.dims = dims or ()
        if all(dim is None for dim in frame.dims):
            if not any(shapes):
                self._pattern.forget()
                raise messages.shared_input(frame.place, shapes, records)
            # One record at a time, perhaps: seeds tell, and refuse a table that is shared by all.
            frame.dims, frame.has_rows = tuple(0 if shape else None for shape in shapes), True
            return
        frame.unsure = not self._pattern.layout.sure(frame.place, shapes)
        self._pattern.remember_single(frame.place)

    def _locate_output(self, frame: Frame, given: Shapes, shapes: Shapes, records: int) -> None:
        place, layout = frame.place.output(), self._pattern.layout
        dims = None if frame.has_rows else layout.dims(place, shapes, records)
        if dims is None and shapes:
            self._locate_rows(frame, given, shapes, records)
            return
        frame.out_dims = dims or ()
        if any(dim is None for dim in frame.out_dims):
            self._pattern.forget()
            raise messages.shared_input(frame.place.output(), shapes, records)
        frame.unsure |= not self._pattern.layout.sure(frame.place.output(), shapes)

    def _locate_rows(self, frame: Frame, shapes: Shapes, out_shapes: Shapes, records: int) -> None:
        """A call whose rows are not the records: seeds are to tell whose they are."""
        out_dims = self._pattern.layout.row_dims(frame.place.output(), out_shapes)
        if all(dim is None for dim in out_dims):
            out_dims = tuple(0 if shape else None for shape in out_shapes)
        try:
            found = rows_of_call(frame.layer, frame.dims, shapes, out_dims, out_shapes, records)
        except UnsupportedModule:
            self._pattern.forget()
            raise
        frame.dims, frame.out_dims, frame.rows = found
        frame.has_rows = True
        self._route()

    def _route(self) -> None:
        """The open micro-batch has rows that are not its records."""
        if self._receiver.micro is not None:
            self._receiver.micro.routed = True
        if self._forward_pass is not None:
            self._forward_pass.routed = True

    # Taps.

    def _tapped(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The output of a module whose parameters were turned off, with a tap on it."""
        layer, micro = frame.layer, self._receiver.micro
        if layer.is_generic:
            self._refuse_generic(frame, args, kwargs, output)
        single = isinstance(output, Tensor) and output.is_floating_point()
        if micro is not None and micro.records:
            along = frame.along
            if single and along is not None and output.shape[along : along + 1] == (micro.records,):
                frame.out_dims = frame.dims
            else:
                self._locate_output(frame, shapes_of((args, kwargs)), shapes_of(output, floating=True), micro.records)
            if frame.has_rows and not frame.rows:
                return output  # no row came here, so no gradient will
            if self.looks_at_data:
                self._look_at_data(frame, (args, kwargs), micro)
        call = self._call(frame, args, kwargs)
        if single:
            if micro is not None:
                micro.tapped += output.nbytes
            return Tap.apply(self._anchor, call, output)[0]  # type: ignore[no-untyped-call]
        leaves, spec = pytree.tree_flatten(output)
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        tapped = Tap.apply(self._anchor, call, *differentiable(output))  # type: ignore[no-untyped-call]
        for k, value in zip(places, tapped, strict=True):
            leaves[k] = value
        return pytree.tree_unflatten(leaves, spec)

    def _refuse_generic(self, frame: Frame, args: Any, kwargs: Any, output: Any) -> None:
        """A module without a rule is computed again record by record, which must give the same."""
        messages.refuse_packed(frame.layer.name, (args, kwargs, output))
        messages.refuse_hidden(frame.layer.name, output)
        before = frame.random_state
        if before is not None and not same_random_state(before, random_state_of(before.cuda, ())):
            raise messages.draws_at_random(frame.layer.name)

    def _call(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        layer, receiver = frame.layer, self._receiver
        wanted = layer.own
        if len(frame.turned_off) < len(wanted):
            off = set(map(id, frame.turned_off))
            pairs = zip(wanted.items(), layer.live, strict=True)
            wanted = {local: name for (local, name), parameter in pairs if id(parameter) in off}
        self._count(wanted)
        where = (frame.dims, frame.out_dims)
        call = Call(receiver.call, receiver.micro, self._forward_pass, layer, layer.name, wanted, *where, (), [])
        saved = frame.takeover.kept if frame.takeover else None
        if saved is None and not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            call.tensors = (args[0].detach(),)
        else:
            call.flatten(args, kwargs, saved)
        if frame.rows:
            call.rows = frame.rows
        elif frame.unsure:
            call.unsure, call.shapes = True, shapes_of((args, kwargs))
            call.learn = partial(self._pattern.layout.learn, frame.place)
        return call

    def _count(self, wanted: dict[str, str]) -> None:
        """One more tap for each of these parameters."""
        micro = self._receiver.micro
        if micro is None:
            return
        for name in wanted.values():
            micro.uses[name] = micro.uses.get(name, 0) + 1
        if _recomputing():
            micro.late = True
            if self._receiver.trial is None:
                self._receiver.begin()

    def _look_at_data(self, frame: Frame, inputs: tuple[Any, Any], micro: MicroBatch) -> None:
        """Note the records whose data are not finite where these enter a module, before any parameter has touched them. In a
        module without a rule -inf may belong to a mask."""
        tensors = plain_tensors(inputs) or [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        for tensor, dim in zip(tensors, frame.dims, strict=True):
            broken = broken_records(tensor, dim, micro.records, masks=frame.layer.is_generic)
            if broken is not None:
                micro.broken = broken if micro.broken is None else micro.broken | broken

    # Operations on traced tensors.

    def locate(self, owner: str, operands: list[Any], results: list[Tensor]) -> Located:
        """Where the records lie in the operands, tensors and sizes, and in the results of an operation."""
        inside = self._frames[-1].place if self._frames else Place("", 0)
        place, layout, micro = self._operations.place(owner, inside), self._pattern.layout, self._receiver.micro
        result = place._replace(side="result")
        if micro is not None and owner in self._pattern.routed:
            found = rows_of_operation(operands, results)
            if is_single(operands):
                self._pattern.forget()
                raise messages.rows_together(owner)
            if found.rows:
                self._route()
            return found
        if micro is None or not (layout.knows(place) and layout.knows(result)):
            self._pattern.forget()
            raise messages.left_the_model(owner)
        shapes, result_shapes = located_shapes(operands, results)
        dims, out_dims = layout.dims(place, shapes, micro.records), layout.dims(result, result_shapes, micro.records)
        rows = 0
        if dims is None or out_dims is None:
            dims, out_dims = layout.row_dims(place, shapes), layout.row_dims(result, result_shapes)
            rows = rows_of_results(owner, dims, shapes, out_dims, result_shapes, micro.records)
            self._route()
        refuse_mixing(owner, operands, dims, out_dims)
        return Located(dims, out_dims, rows)

    def tap(self, crossing: Crossing, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        """The results of an operation in which parameters met the records, tapped."""
        receiver = self._receiver
        crossing.micro, crossing.forward_pass, crossing.receive = receiver.micro, self._forward_pass, receiver.crossing
        roots = [root.name for traced in crossing.traced for root in traced.roots]
        for name in roots:
            self._count({name: name})
        return Tap.apply(self._anchor, crossing, *outputs)  # type: ignore[no-untyped-call]

    def give_up(self, owner: str, operation: str) -> None:
        """The module cannot be taken operation by operation, and the probe did not find it out."""
        self._pattern.forget()
        raise messages.in_place(owner, operation)


def _recomputing() -> bool:
    """Whether a backward pass is running."""
    return torch._C._current_graph_task_id() != -1
