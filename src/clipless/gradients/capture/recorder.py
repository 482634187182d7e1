"""The recorder: what happens around each module while the model runs on an open micro-batch.

Around a module with trainable parameters of its own it turns `requires_grad` of those parameters off, so that autograd
computes no weight gradient, and puts a tap on the module's output. In a module without a rule, traced tensors replace the
parameters while it runs, and the operations that combine them with records are tapped.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipless.gradients.capture import messages
from clipless.gradients.capture.calls import Call
from clipless.gradients.capture.frames import CurrentPass, Frame, OperationCounter
from clipless.gradients.capture.gathering import gathered
from clipless.gradients.capture.hooks import Hooks, tap, tap_leaves
from clipless.gradients.capture.layout import Place
from clipless.gradients.capture.locating import locate_input, locate_output, mark_broken
from clipless.gradients.capture.micro_batch import MicroBatch
from clipless.gradients.capture.model_map import Layer, ModelMap
from clipless.gradients.capture.operations import RecordedOperations
from clipless.gradients.capture.patterns import CallPattern
from clipless.gradients.capture.probe import LearnedPatterns
from clipless.gradients.capture.receiver import TRAINING, Receiver
from clipless.gradients.capture.refusals import refuse_module
from clipless.gradients.capture.stand_ins import StandIns
from clipless.gradients.capture.watch import StateWatch, StructureWatch
from clipless.gradients.checks.self_check import SelfCheck
from clipless.gradients.records import resized
from clipless.gradients.recurrent.takeover import take_over
from clipless.gradients.shards import Shards
from clipless.gradients.trees import Shapes, closed, opened, shapes_of
from clipless.random_state import cuda_devices, random_state_of
from clipless.torch_internals import current_graph_task, maybe_current_level


class Recorder:
    """Handles the forward hooks: taps the outputs of modules while the receiver has an open micro-batch.

    Taps are connected to the anchor of the forward pass, or to a spare one where a part of the model is computed again. If
    it `checks_data`, it marks the records of the micro-batch whose data are not finite.
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
        self.checks_data = False
        self._map, self._hooks, self._receiver, self._self_check = layers, hooks, receiver, self_check
        self._model, self._modules = model, layers.modules
        self._structure, self._watch, self._shards = StructureWatch(model, layers.sharded), watch, shards
        self._stand_ins = StandIns(hooks)
        self._patterns = LearnedPatterns(layers, hooks, watch, shards)
        self._current = CurrentPass(CallPattern(layers.rules))
        self._frames = self._current.frames
        self._operations = RecordedOperations(self._current, receiver)
        self._stand_in = False
        self._entered: tuple[MicroBatch | None, Layer | None] = None, None
        self.spare_anchor = self._current.anchor

    def attach(self) -> None:
        """Remember the model's structure: changes are refused from now on."""
        self._structure.open()

    def restore(self) -> None:
        """Restore the parameters that an interrupted forward pass has left frozen or replaced."""
        while self._frames:
            self._frames.pop().put_back()

    # Around each module.

    def approach(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the forward of a sharded model: probes run here, before FSDP2 gathers the parameters for that forward."""
        if self._receiver.micro is None or not torch.is_grad_enabled() or _recomputing():
            return None
        self.restore()
        changed = self._enter_model(layer, args, kwargs)
        self._stand_in = changed is not None
        return changed

    def enter(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a module's forward."""
        if layer.suspect:
            refuse_module(layer.module, layer.name)
        frames = self._frames
        if frames and frames[0].layer is layer:
            self.restore()  # an earlier pass was interrupted without torch calling the hooks
        armed, inside, changed = torch.is_grad_enabled(), bool(frames) and frames[-1].inside, None
        stand_in = False
        if armed and not inside and self._receiver.micro is not None:
            if self._shards is None or _recomputing():
                changed = self._enter_model(layer, args, kwargs)
                args, kwargs = changed or (args, kwargs)
                stand_in = changed is not None
            elif layer.module is self._shards.root:
                stand_in = self._stand_in
            else:
                raise messages.inside_shards(layer.name)
        calls = self._current.calls
        number = calls[layer.name] = calls.get(layer.name, 0) + 1
        frame = Frame(layer, Place(layer.name, number), armed, armed or inside, stand_in)
        frames.append(frame)
        if self._current.pattern.strays and armed:
            outermost = None if inside else self._receiver.micro
            frame.handle_strays(self._current.pattern, self._map, outermost, self._operations)
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
        """A forward pass begins: find where its records lie. For an empty batch, returns inputs with one row to run on
        instead; the row enters no sum."""
        micro, current, again = self._receiver.micro, self._current, _recomputing()
        assert micro is not None
        if again and self._entered[0] is micro:
            empty = micro.records == 0 and self._entered[1] is layer
            return self._stand_ins.inputs(layer.module, (args, kwargs)) if empty else None
        if not again and micro.begun and not micro.done:
            micro = self._receiver.restart()
        self._entered, self._hooks.empty = (micro, layer), micro.records == 0
        self._structure.refuse_changes()
        if layer.module is not self._model and not micro.by_function and self._map.trains(layer.module):
            raise messages.called_in_parts(layer.name)
        inputs, changed = (args, kwargs), None
        with self._probing(layer, inputs, micro.records):
            if micro.records == 0:
                messages.refuse_unfit_inputs(layer.name, inputs, 0)
                if self._map.trains(layer.module):  # a loss is run on no rows: its output has none to be removed again
                    inputs = changed = self._stand_ins.inputs(layer.module, inputs)
            elif not self._same_pattern(layer, args, kwargs, micro.records):
                current.pattern = self._patterns.find(layer, inputs, micro.records)
        current.calls, current.operations = {}, OperationCounter()
        micro.modes = list(map(TRAINING, self._modules))
        pattern = current.pattern
        if pattern.unchecked and micro.records > 1 and not again:
            micro.due, pattern.unchecked = True, False
        forward_pass = self._self_check.begin(layer.module, layer.name, inputs, micro, pattern.reading, pattern.square)
        current.forward_pass, current.anchor = forward_pass, forward_pass.anchor
        micro.anchors.append(forward_pass.anchor)
        if micro.records and pattern.has_rows:
            current.route(micro)  # though by chance every module may get as many rows as there are records
        return changed

    def _probing(self, layer: Layer, inputs: tuple[Any, Any], records: int) -> AbstractContextManager[object]:
        """Around probes: where any process of a sharded model has to probe, all gather the model, as not all run it equally
        often."""
        if self._shards is None or self._shards.whole:
            return nullcontext()
        known = self._patterns.knows(layer, inputs) if records else self._stand_ins.knows(layer.module, inputs)
        return gathered(self._shards, self._hooks, self._map, wanted=not known)

    def _same_pattern(self, layer: Layer, args: Any, kwargs: Any, records: int) -> bool:
        """Whether the model is called as in the last pass, with a single floating-point tensor."""
        pattern = self._current.pattern
        before = pattern.single_input
        if before is None or len(args) != 1 or kwargs or pattern.square or not pattern.learned:
            return False
        given = args[0]
        if not isinstance(given, Tensor) or not given.is_floating_point():
            return False
        return before == (id(layer.module), layer.module.training, given.dim()) and given.shape[0] == records

    def _leave_model(self, frame: Frame, output: Any, micro: MicroBatch) -> Any:
        """A forward pass ends. Refuses writes into the model, removes the row added for an empty batch, and taps the output
        of a checked pass."""
        current = self._current
        forward_pass, current.forward_pass, current.anchor = current.forward_pass, None, self.spare_anchor
        self._watch.refuse_pass(micro.records, None if _recomputing() else current.calls)
        checked = forward_pass is not None and micro.records > 0 and self._self_check.wanted(forward_pass, micro)
        if self._shards is not None and not self._shards.whole and not _recomputing():
            self._shards.gather_if(checked)
        if micro.records == 0 and frame.stand_in:
            return resized(output, {k: 0 for k, shape in enumerate(shapes_of(output)) if shape[:1] == (1,)}, 0)
        if not checked or forward_pass is None:
            return output
        shapes = shapes_of(output, floating=True)
        dims = current.pattern.layout.output_dims(frame.place.output(), shapes, micro.records)
        return self._self_check.end(forward_pass, micro, output, dims)

    # Around a module with parameters of its own.

    def _arm(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Freeze the module's parameters, or replace them by traced tensors."""
        layer, micro = frame.layer, self._receiver.micro
        if maybe_current_level() is not None:
            raise messages.transformed(layer.name)
        records, pattern = 0 if micro is None else micro.records, self._current.pattern
        if layer.sharded and any(hasattr(parameter, "device_mesh") for parameter in layer.live):
            raise messages.still_divided(layer.name)
        by_operation = layer.name in pattern.by_operation
        for held in layer.module._parameters.values():
            if held.__class__ is not nn.Parameter and not by_operation and frame.is_swapped:
                raise messages.swapped(layer.name)
        if records and by_operation:
            self._note(frame.place, ())
            frame.trace_parameters(self._operations)
            return
        if records:
            along = pattern.single_tensors.get(frame.place)
            given = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else None
            if along is not None and given is not None and given.shape[along : along + 1] == (records,):
                frame.along, frame.dims = along, (along,)
                self._note(frame.place, (given.shape,))
            else:
                shapes = shapes_of((args, kwargs))
                self._note(frame.place, shapes)
                locate_input(pattern, frame, shapes, records)
            if layer.is_generic:
                frame.random_state = random_state_of(cuda_devices(layer.module), ())
        for parameter in layer.live if layer.sharded else layer.parameters:
            if parameter.requires_grad:
                parameter.requires_grad = False
                frame.turned_off.append(parameter)
        if records and frame.turned_off and layer.is_recurrent:
            frame.takeover = take_over(layer.module)

    def _note(self, place: Place, shapes: Shapes) -> None:
        """Add a call to the steps of the forward pass."""
        forward_pass = self._current.forward_pass
        if forward_pass is not None and not _recomputing():
            forward_pass.steps.add((forward_pass.last, place, *map(len, shapes)))
            forward_pass.last = place.name

    # Taps.

    def _tapped(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The output of a module whose parameters were frozen, with a tap on it."""
        layer, micro, current = frame.layer, self._receiver.micro, self._current
        if layer.is_generic:
            messages.refuse_packed(layer.name, (args, kwargs, output))
            messages.refuse_hidden(layer.name, output)
            frame.refuse_random()
        single = isinstance(output, Tensor) and output.is_floating_point()
        if micro is not None and micro.records:
            along = frame.along
            if single and along is not None and output.shape[along : along + 1] == (micro.records,):
                frame.out_dims = frame.dims
            else:
                shapes, out_shapes = shapes_of((args, kwargs)), shapes_of(output, floating=True)
                locate_output(current.pattern, frame, shapes, out_shapes, micro.records)
                if frame.rows:
                    current.route(micro)
            if frame.has_rows and not frame.rows:
                return output  # it has no rows, so no gradient will arrive
            if self.checks_data:
                mark_broken(frame, (args, kwargs), micro)
        call = self._call(frame, args, kwargs)
        if single:
            if micro is not None:
                micro.tapped += output.nbytes
            return tap(current.anchor, call, output)[0]
        return tap_leaves(current.anchor, call, output)

    def _call(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        layer, receiver = frame.layer, self._receiver
        wanted = layer.own
        if len(frame.turned_off) < len(wanted):
            off = set(map(id, frame.turned_off))
            pairs = zip(wanted.items(), layer.live, strict=True)
            wanted = {local: name for (local, name), parameter in pairs if id(parameter) in off}
        where, forward_pass = (frame.dims, frame.out_dims), self._current.forward_pass
        call = Call(receiver.call, receiver.micro, forward_pass, layer, layer.name, wanted, *where, (), [])
        saved = frame.takeover.kept if frame.takeover else None
        if saved is None and not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            call.tensors = (args[0].detach(),)
        else:
            call.flatten(args, kwargs, saved)
        if frame.rows:
            call.rows, call.by_record = frame.rows, frame.by_record
        elif frame.unsure:
            call.unsure, call.shapes = True, shapes_of((args, kwargs))
            call.learn = partial(self._current.pattern.layout.learn, frame.place)
        receiver.expect(wanted.values())
        return call


def _recomputing() -> bool:
    """Whether a backward pass is running, in which parts of a model may be computed again."""
    return current_graph_task() != -1
