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
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from clipless.errors import UnsupportedModule
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
    refuse_hidden,
    refuse_packed,
    shared_input,
    turn_off,
    unseen_by_checkpoints,
)
from clipless.grads.layout import (
    Dims,
    Place,
    Reading,
    Shapes,
    broken_records,
    plain_tensors,
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
from clipless.grads.refusals import BufferGuard, refuse_compiled, refuse_module
from clipless.grads.rules import generic, rule_of
from clipless.grads.rules.generic import differentiable
from clipless.grads.shared import Crossing, Operations, Shared, refuse_mixing, root
from clipless.grads.takeover import take_over
from clipless.grads.tap import Call, Hook, Tap, flattened, refuse_stray
from clipless.grads.ways import Ways


class Tape:
    """Hooks on a model that make the receiver get the gradients at every module, for the open part.

    `open(part)` before the forward pass. If it `looks_at_data`, the part is told which records' data are not finite.
    `interrupted` is called where a forward pass follows a backward pass that was not finished.
    """

    def __init__(self, model: nn.Module, receiver: Receiver) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.rules = receiver.rules
        self.receiver = receiver
        self._names = {module: name or "(model)" for name, module in model.named_modules()}
        self._own = self._owned_parameters(model)
        self._anchor = torch.zeros((), requires_grad=True)
        self._ways = Ways(self.rules)
        self._learned: dict[object, Ways] = {}
        self._buffers = BufferGuard(model)
        self._frames: list[Frame] = []
        self._calls: dict[str, int] = {}
        self._operation_counts: dict[tuple[str, str, int], int] = {}
        self._entered: tuple[Part | None, nn.Module | None] = None, None
        self._stand_ins = StandIns(receiver)
        self._probed = 0
        self.looks_at_data = False
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
                module.register_forward_hook(Hook(self._leave), with_kwargs=True, always_call=True),
            ]
        for name, parameter in self.parameters.items():
            self._handles.append(parameter.register_hook(refuse_stray(name)))

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
        if self.receiver.busy:
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
            changed = args, kwargs = self._begin_forward(module, args, kwargs, self.part.records)
        elif outermost and self.part is not None and self.part.records == 0 and self._entered[1] is module:
            changed = args, kwargs = self._stand_ins.given(module, (args, kwargs))
        frame = Frame(module, self._place(self._names[module]), armed, stand_in=changed is not None)
        self._frames.append(frame)
        if armed:
            self._arm(frame, args, kwargs)
        return changed

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any, records: int) -> tuple[Any, Any]:
        """At the outermost module: learn the layout, once for each way in which it is called, and give an empty batch a row
        that no sum will ever see."""
        forward = torch._C._current_graph_task_id() == -1
        if forward and self.part is not None and self.part.begun and not self.part.done:
            self.interrupted()
        self._entered = self.part, module
        refuse_foreign_rows((args, kwargs), records)
        refuse_packed(self._names[module], (args, kwargs))
        self._buffers.remember()
        if records == 0:
            args, kwargs = self._stand_ins.given(module, (args, kwargs))
        else:
            self._ways = self._learned.setdefault(signature(module, (args, kwargs)), Ways(self.rules))
            if not self._ways.learned:
                self._learn(module, (args, kwargs), records)
                self._buffers.refuse_changes()
        self._calls, self._operation_counts = {}, {}
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
            self._share(frame)
            return
        if records:
            frame.dims = self._placed(frame.place, shapes_of((args, kwargs)), records, any)
            if self.rules[frame.place.name] is generic:
                frame.random_state = random_state(frame.module)
        turn_off(frame, (self.parameters[name] for name in own.values()))
        if records and frame.turned_off and self.rules[frame.place.name] is not generic:
            frame.takeover = take_over(frame.module)

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
        if self._probed:
            return tuple(outputs)
        crossing.part, crossing.receive = self.part, self.receiver.crossing
        self._count(root.name for shared in crossing.shared for root in shared.roots)
        return Tap.apply(self._anchor, crossing, *outputs)  # type: ignore[no-untyped-call]

    def _placed(self, place: Place, shapes: Shapes, records: int, enough: Callable[[Iterable[bool]], bool]) -> Dims:
        """Where the records lie in each of the tensors; refused if that is not enough to tell records apart."""
        try:
            dims = self._ways.layout.dims(place, shapes, records)
            if not enough(dim is not None for dim in dims):
                raise shared_input(place, shapes, records)
        except UnsupportedModule:
            self._ways.forget()
            raise
        return dims

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.receiver.busy or not self._frames or self._frames[-1].module is not module:
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
            output = self._tap(frame, args, kwargs, output)
        if not any(frame.armed for frame in self._frames):
            self._buffers.refuse_changes()
            if frame.stand_in and self.part is not None and self.part.records == 0:
                output = resized(output, {k: 0 for k, shape in enumerate(shapes_of(output)) if shape[:1] == (1,)}, 0)
        return closed(output)

    def _tap(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.rules[frame.place.name] is generic:
            refuse_packed(frame.place.name, (args, kwargs, output))
            refuse_hidden(frame.place.name, output)
        if self.part is not None and self.part.records > 0:
            frame.out_dims = self._placed(
                frame.place.output(), shapes_of(output, floating=True), self.part.records, all
            )
            if self.looks_at_data:
                self._look(frame, (args, kwargs), self.part)
        call = self._call(frame, args, kwargs)
        if isinstance(output, Tensor) and output.is_floating_point():
            if self.part is not None:
                self.part.tapped += output.nbytes
            return Tap.apply(self._anchor, call, output)[0]  # type: ignore[no-untyped-call]
        leaves, spec = pytree.tree_flatten(output)
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        tapped = Tap.apply(self._anchor, call, *differentiable(output))  # type: ignore[no-untyped-call]
        for k, value in zip(places, tapped, strict=True):
            leaves[k] = value
        return pytree.tree_unflatten(leaves, spec)

    def _look(self, frame: Frame, inputs: tuple[Any, Any], part: Part) -> None:
        """Note the records whose data are not finite where these enter a module, before any parameter has touched them. In
        a module without a rule -inf may be of a mask."""
        masks = self.rules[frame.place.name] is generic
        tensors = plain_tensors(inputs) or [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        for tensor, dim in zip(tensors, frame.dims, strict=True):
            broken = broken_records(tensor, dim, part.records, masks)
            if broken is not None:
                part.broken = broken if part.broken is None else part.broken | broken

    def _call(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        own, turned_off = self._own[frame.module], set(map(id, frame.turned_off))
        wanted = {local: name for local, name in own.items() if id(self.parameters[name]) in turned_off}
        self._count(wanted.values())
        leaves, spec = flattened(args, kwargs, frame.takeover.kept if frame.takeover else None)
        name, receive = self._names[frame.module], self.receiver.call
        return Call(receive, self.part, frame.module, name, wanted, frame.dims, frame.out_dims, leaves, spec)

    def _count(self, names: Iterable[str]) -> None:
        """One more tap for each of these parameters."""
        if self.part is not None:
            for name in names:
                self.part.uses[name] = self.part.uses.get(name, 0) + 1
            if torch._C._current_graph_task_id() != -1:
                self.part.late = True
                self.receiver.begin(self.part)

    def _place(self, name: str) -> Place:
        self._calls[name] = self._calls.get(name, 0) + 1
        return Place(name, self._calls[name])
