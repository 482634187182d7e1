"""The tape: all hooks on the model, and what they write down during one forward pass.

Around each module with trainable parameters of its own the tape turns `requires_grad` of those parameters off, so that
autograd computes no weight gradient, and puts an identity, the tap, on the module's output, which hands the output's
gradient to the receiver in the backward pass. A module without a rule has its parameters replaced by shared tensors while
it runs, and the tap is on the operations that these meet the records in.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clipless.grads.empty import StandIns
from clipless.grads.frames import (
    Frame,
    Part,
    by_size,
    draws_at_random,
    idle,
    in_place,
    left_the_model,
    own_parameters,
    put_back,
    refuse_foreign_rows,
    refuse_packed,
    turn_off,
    unseen_by_checkpoints,
)
from clipless.grads.layout import (
    Dims,
    Place,
    Reading,
    Shapes,
    is_square,
    random_state,
    random_state_kept,
    readings,
    resized,
    shapes_of,
    signature,
    telling_records,
    telling_sizes,
)
from clipless.grads.outputs import closed, opened
from clipless.grads.receiver import Receiver
from clipless.grads.refusals import refuse_compiled, refuse_module
from clipless.grads.rules import generic, rule_of
from clipless.grads.self_check import SelfCheck, note_step
from clipless.grads.shared import Crossing, Operations, Shared, refuse_mixing, root
from clipless.grads.takeover import take_over
from clipless.grads.tap import Hook, refuse_stray
from clipless.grads.taps import Taps, placed
from clipless.grads.watch import StateWatch, StructureWatch
from clipless.grads.ways import Ways


class Tape:
    """Hooks on a model that make the receiver get the gradients at every module, for the open part.

    `open(part)` before the forward pass. `interrupted` is called where a forward pass follows a backward pass that was not
    finished.
    """

    def __init__(self, model: nn.Module, receiver: Receiver) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.rules = receiver.rules
        self.receiver = receiver
        self._names = {module: name or "(model)" for name, module in model.named_modules()}
        self._own = self._owned_parameters(model)
        receiver.parameters, receiver.modules = self.parameters, list(self._names)
        self._taps = Taps(receiver, self._own)
        self.self_check = SelfCheck(receiver, self._names)
        self._ways = Ways(self.rules)
        self._learned: dict[object, Ways] = {}
        self._structure, self._watch = StructureWatch(model), StateWatch(model)
        self._frames: list[Frame] = []
        self._calls: dict[str, int] = {}
        self._operation_counts: dict[tuple[str, str, int], int] = {}
        self._entered: tuple[Part | None, nn.Module | None] = None, None
        self._stand_ins = StandIns(receiver)
        self._probed = 0
        self.interrupted: Callable[[], None] = lambda: None
        self._operations = Operations(self._locate, self._wrap, self._give_up)
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        for module in self._names:
            refuse_compiled(module, self._names[module])
            refuse_module(module, self._names[module])
        for module in self._names:
            if idle(module):
                continue
            self._handles += [
                module.register_forward_pre_hook(Hook(self._enter), with_kwargs=True),
                module.register_forward_hook(Hook(self._leave), prepend=True, with_kwargs=True, always_call=True),
            ]
        for name, parameter in self.parameters.items():
            self._handles.append(parameter.register_hook(refuse_stray(name, self.receiver.busy)))
        self._structure.open()

    def detach(self) -> None:
        self.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def modules(self) -> Iterable[nn.Module]:
        """The modules that the tape watches."""
        return self._names

    def intact(self) -> bool:
        """Whether every hook is still where the tape put it."""
        return bool(self._handles) and all(h.id in (h.hooks_dict_ref() or ()) for h in self._handles)

    def restore(self, depth: int = 0) -> None:
        """Put back what an interrupted forward pass has left turned off or replaced, in all frames but the first few."""
        while len(self._frames) > depth:
            put_back(self._frames.pop())

    def open(self, part: Part | None) -> None:
        """From now on forward passes belong to this part; whatever an earlier one left unfinished is dropped."""
        self.restore()
        self.receiver.part = part
        if part is None:
            self._watch.close()
        elif not self._watch.is_open:
            self._watch.open(closely=part.due or not self.self_check.active)

    def refuse_changes(self) -> None:
        """Raise if anything was written into the model while the batch was open."""
        self._watch.refuse_step()

    def look_at_data(self) -> None:
        """From now on parts are told which records' data are not finite."""
        self._taps.looks_at_data = True

    @property
    def part(self) -> Part | None:
        """The records that forward passes belong to."""
        return self.receiver.part

    def _owned_parameters(self, model: nn.Module) -> dict[nn.Module, dict[str, str]]:
        """For each module the trainable parameters it uses itself: path in the module -> name in the model, the first
        one if shared."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        owned = {}
        for module, module_name in self._names.items():
            own = {path: names[id(p)] for path, p in own_parameters(module).items() if id(p) in names}
            if own:
                owned[module] = own
                self.rules[module_name] = rule_of(module) or generic
        return owned

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.receiver.busy.now:
            return None
        if self._probed:
            refuse_module(module, self._names[module])
            self._frames.append(Frame(module, self._place(self._names[module]), armed=False))
            self._ways.layout.note(self._frames[-1].place, shapes_of((args, kwargs)))
            if self._names[module] in self._ways.by_operation:
                self._share(self._frames[-1])
            return None
        if self._frames and self._frames[0].module is module:
            self.restore()  # an earlier pass was interrupted where torch calls no hooks
        refuse_module(module, self._names[module])
        armed = torch.is_grad_enabled()
        recomputing = torch._C._current_graph_task_id() != -1
        outermost = armed and not any(frame.armed for frame in self._frames)
        changed = None
        if outermost and self.part is not None and not (recomputing and self._entered[0] is self.part):
            changed = args, kwargs = self._begin_forward(module, args, kwargs, self.part)
        elif outermost and self.part is not None and self.part.records == 0 and self._entered[1] is module:
            changed = args, kwargs = self._stand_ins.given(module, (args, kwargs))
        frame = Frame(module, self._place(self._names[module]), armed, stand_in=changed is not None)
        self._frames.append(frame)
        if armed:
            self._arm(frame, args, kwargs)
        return changed

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any, part: Part) -> tuple[Any, Any]:
        """At the outermost module: learn the layout, once for each way in which it is called, and give an empty batch a row
        that no sum will ever see."""
        if torch._C._current_graph_task_id() == -1 and part.begun and not part.done:
            self.interrupted()
            assert self.part is not None
            part = self.part
        self._entered = part, module
        refuse_foreign_rows((args, kwargs), part.records)
        refuse_packed(self._names[module], (args, kwargs))
        self._structure.refuse_changes()
        if part.records == 0:
            args, kwargs = self._stand_ins.given(module, (args, kwargs))
        else:
            self._ways = self._learned.setdefault(signature(module, (args, kwargs)), Ways(self.rules))
            square = is_square((args, kwargs), part.records)
            if not self._ways.learned:
                self._learn(module, (args, kwargs), part.records)
                self._watch.refuse_pass(part.records)
                self._ways.square = square
            self._ways.square &= square
        self._calls, self._operation_counts = {}, {}
        part.modes = [module.training for module in self._names]
        self._taps.entry = self.self_check.begin(module, self._names[module], (args, kwargs), part, self._ways)
        return args, kwargs

    def _learn(self, module: nn.Module, inputs: tuple[Any, Any], records: int) -> None:
        found = list(readings(inputs, records))
        needed = telling_records(inputs, found[0]) if found else []

        def run(reading: Reading, size: int) -> None:
            self._probe(module, resized(inputs, reading, size, needed), size)

        if not self._ways.learn(run, found, telling_sizes(inputs, module, records, len(needed))):
            self._probe(module, inputs, records)  # shows the model's own error, if that was the trouble
            raise self._ways.refusal()

    def _probe(self, module: nn.Module, inputs: tuple[Any, Any], size: int) -> None:
        """One pass with another number of records, of which the hooks note the shapes and nothing is kept."""
        some_args, some_kwargs = inputs
        depth, self._calls, self._operation_counts, self._probed = len(self._frames), {}, {}, size
        self._ways.layout.begin_pass(size)
        try:
            with random_state_kept(module), unseen_by_checkpoints():
                module(*some_args, **some_kwargs)
        finally:
            self._probed = 0
            self.restore(depth)

    def _arm(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = self._own.get(frame.module)
        records = 0 if self.part is None else self.part.records
        if own is None:
            return
        if records and frame.place.name in self._ways.by_operation:
            self._note(frame.place, ())
            self._share(frame)
            return
        if records:
            shapes = shapes_of((args, kwargs))
            self._note(frame.place, shapes)
            frame.dims = placed(self._ways, frame.place, shapes, records, any)
            frame.unsure = not self._ways.layout.sure(frame.place, shapes)
            if self.rules[frame.place.name] is generic:
                frame.random_state = random_state(frame.module)
        turn_off(frame, (self.parameters[name] for name in own.values()))
        if records and frame.turned_off and self.rules[frame.place.name] is not generic:
            frame.takeover = take_over(frame.module)

    def _note(self, place: Place, shapes: Shapes) -> None:
        if self._taps.entry is not None and torch._C._current_graph_task_id() == -1:
            note_step(self._taps.entry, place, shapes)

    def _share(self, frame: Frame) -> None:
        """Replace the parameters that the module uses itself by shared tensors while it runs."""
        for path, name in self._own.get(frame.module, {}).items():
            prefix, _, local = path.rpartition(".")
            holder, parameter = frame.module.get_submodule(prefix), self.parameters[name]
            if parameter.requires_grad and not isinstance(holder._parameters[local], Shared):
                holder._parameters[local] = root(name, frame.place.name, parameter, self._operations)  # type: ignore[assignment]
                frame.swapped.append((holder, local, parameter))

    def _locate(self, owner: str, operands: list[Any], results: list[Tensor]) -> tuple[Dims, Dims]:
        """Where the records lie in the operands, tensors and sizes, and in the results of an operation."""
        inside = self._frames[-1].place if self._frames else Place("", 0)
        key = (owner, inside.name, inside.call)
        self._operation_counts[key] = self._operation_counts.get(key, 0) + 1
        place = Place(owner, inside.call, "operand", self._operation_counts[key], inside.name)
        shapes = tuple(x.shape if isinstance(x, Tensor) else torch.Size([max(x, 0)]) for x in operands)
        places = {place: shapes, place._replace(side="result"): tuple(result.shape for result in results)}
        if self._probed:
            for where, what in places.items():
                self._ways.layout.note(where, what)
            found = [by_size(what, self._probed) for what in places.values()]
        elif self.part is None or not all(map(self._ways.layout.knows, places)):
            self._ways.forget()
            raise left_the_model(owner)
        else:
            found = [self._ways.layout.dims(where, what, self.part.records) for where, what in places.items()]
            refuse_mixing(owner, operands, *found)
        return found[0], found[1]

    def _give_up(self, owner: str, operation: str) -> None:
        """The module cannot be taken operation by operation: found in a probe, it is taken as a whole."""
        if not self._probed:
            self._ways.forget()
            raise in_place(owner, operation)
        self._ways.layout.give_up(owner)

    def _wrap(self, crossing: Crossing, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(outputs) if self._probed else self._taps.crossing(crossing, outputs)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.receiver.busy.now or not self._frames or self._frames[-1].module is not module:
            return None
        frame = self._frames.pop()
        put_back(frame)
        output = opened(output)
        if self._probed:
            self._ways.layout.note(frame.place.output(), shapes_of(output, floating=True))
            return None
        if not frame.armed or output is None:
            return None
        if frame.turned_off:
            if frame.random_state and frame.random_state != random_state(module):
                raise draws_at_random(frame.place.name)  # the generic rule computes it again, which must give the same
            output = self._taps.on(frame, self._ways, args, kwargs, output)
        if not any(frame.armed for frame in self._frames):
            output = self._end_forward(frame, output)
        return closed(output)

    def _end_forward(self, frame: Frame, output: Any) -> Any:
        """At the outermost module: nothing was written into the model, an empty batch's row is cut off, and the output of a
        checked pass is tapped."""
        entry, part, self._taps.entry = self._taps.entry, self.part, None
        if part is None:
            return output
        self._watch.refuse_pass(part.records)
        if part.records == 0 and frame.stand_in:
            return resized(output, {k: 0 for k, shape in enumerate(shapes_of(output)) if shape[:1] == (1,)}, 0)
        if part.records == 0 or entry is None or not self.self_check.wanted(entry, part):
            return output
        dims = self._ways.layout.output_dims(frame.place.output(), shapes_of(output, floating=True), part.records)
        return self.self_check.end(entry, part, output, dims)

    def _place(self, name: str) -> Place:
        self._calls[name] = self._calls.get(name, 0) + 1
        return Place(name, self._calls[name])
