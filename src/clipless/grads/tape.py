"""The tape: all hooks on the model, and what they write down during one forward and backward pass.

Around each module with trainable parameters of its own the tape turns `requires_grad` of those parameters off, so that
autograd computes no weight gradient, and puts an identity, the tap, on the module's output. In the backward pass the tap
receives the gradient of the output; with the input it remembers, the module's layer rule makes the pieces of it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from clipless.errors import CliplessError, Misuse, UnsupportedModule
from clipless.grads.layout import Dims, Layout, Place, Shapes, probe, random_state, resized, shapes_of, written
from clipless.grads.pieces import Piece
from clipless.grads.refusals import BufferGuard, refuse_module
from clipless.grads.rules import LayerRule, Use, generic, rule_of
from clipless.grads.rules.generic import differentiable
from clipless.grads.tap import Call, Hook, Tap, refuse_stray


@dataclass
class Part:
    """Some records of a logical batch that go through forward and backward together, and what came back for them."""

    records: int
    uses: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    begun: bool = False
    done: bool = False


@dataclass
class Frame:
    """A module whose forward is running, and which of its parameters the tape has turned off for that time."""

    module: nn.Module
    place: Place
    armed: bool
    turned_off: list[nn.Parameter] = field(default_factory=list)
    dims: Dims = ()
    out_dims: Dims = ()
    random_state: list[Tensor] = field(default_factory=list)


class Tape:
    """Hooks on a model that collect every parameter's pieces for the open part.

    `open(part)` before the forward pass; when the backward pass is over `on_complete(part)` is called with all pieces.
    """

    def __init__(self, model: nn.Module, on_complete: Callable[[Part], None]) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.rules: dict[str, LayerRule] = {}
        self.part: Part | None = None
        self._on_complete = on_complete
        self._names = {module: name or "(model)" for name, module in model.named_modules()}
        self._own = self._owned_parameters(model)
        self._anchor = torch.zeros((), requires_grad=True)
        self._layout = Layout()
        self._buffers = BufferGuard(model)
        self._frames: list[Frame] = []
        self._calls: dict[str, int] = {}
        self._probing = self._paused = False
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        for module in self._names:
            refuse_module(module, self._names[module])
        for module in self._names:
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

    def restore(self) -> None:
        """Turn on again what an interrupted forward pass has left turned off."""
        for frame in self._frames:
            for parameter in frame.turned_off:
                parameter.requires_grad_(True)
        self._frames.clear()

    def open(self, part: Part | None) -> None:
        """From now on forward passes belong to this part; whatever an earlier one left unfinished is dropped."""
        self.restore()
        self.part = part

    def _owned_parameters(self, model: nn.Module) -> dict[nn.Module, dict[str, str]]:
        """For each module its own trainable parameters: local name -> name in the model, the first one if shared."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        owned = {}
        for module, module_name in self._names.items():
            own = {local: names[id(p)] for local, p in module.named_parameters(recurse=False) if id(p) in names}
            if own:
                owned[module] = own
                self.rules[module_name] = rule_of(module) or generic
        return owned

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._paused:
            return None
        if self._probing:
            self._frames.append(Frame(module, self._place(module), armed=False))
            self._layout.note(self._frames[-1].place, shapes_of((args, kwargs)))
            return None
        if self._frames and self._frames[0].module is module:
            self.restore()  # an earlier pass was interrupted where torch calls no hooks
        refuse_module(module, self._names[module])
        armed = torch.is_grad_enabled()
        entry = armed and not any(frame.armed for frame in self._frames)
        changed = None
        if entry and self.part is not None:
            changed = args, kwargs = self._begin_forward(module, args, kwargs, self.part.records)
        frame = Frame(module, self._place(module), armed)
        self._frames.append(frame)
        if armed:
            self._arm(frame, args, kwargs)
        return changed

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any, records: int) -> tuple[Any, Any]:
        """At the outermost module: learn the layout once, and give an empty batch a row that no sum will ever see."""
        _refuse_foreign_rows((args, kwargs), records)
        self._buffers.remember()
        name = self._names[module]
        if records == 0:
            args, kwargs = resized((args, kwargs), 0, 1)
        elif name not in self._layout.entries:
            self._layout.entries.add(name)
            self._calls, self._probing, depth = {}, True, len(self._frames)
            try:
                probe(module, args, kwargs, records)
            finally:
                self._probing = False
                del self._frames[depth:]
            self._buffers.refuse_changes()
        self._calls = {}
        return args, kwargs

    def _arm(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = self._own.get(frame.module)
        if own is None:
            return
        if self.part is not None and self.part.records > 0:
            frame.dims = self._placed(frame.place, shapes_of((args, kwargs)), self.part.records, any)
        if self.rules[frame.place.name] is generic:
            frame.random_state = random_state(frame.module)
        for name in own.values():
            parameter = self.parameters[name]
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                frame.turned_off.append(parameter)

    def _placed(self, place: Place, shapes: Shapes, records: int, enough: Callable[[Iterable[bool]], bool]) -> Dims:
        """Where the records lie in each of the tensors; refused if that is not enough to tell records apart."""
        try:
            dims = self._layout.dims(place, shapes, records)
            if not enough(dim is not None for dim in dims):
                raise _shared(place, shapes, records)
        except UnsupportedModule:
            self._layout.forget()
            raise
        return dims

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._paused or not self._frames or self._frames[-1].module is not module:
            return None
        frame = self._frames.pop()
        if self._probing:
            self._layout.note(frame.place._replace(side="output"), shapes_of(differentiable(output)))
            return None
        for parameter in frame.turned_off:
            parameter.requires_grad_(True)
        if not frame.armed or output is None:
            return None
        if frame.turned_off:
            self._refuse_randomness(frame)
            output = self._tap(frame, args, kwargs, output)
        if not any(frame.armed for frame in self._frames):
            self._buffers.refuse_changes()
            if self.part is not None and self.part.records == 0:
                output = resized(output, 1, 0)
        return output

    def _tap(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        outputs = differentiable(output)
        if self.part is not None and self.part.records > 0:
            place = frame.place._replace(side="output")
            frame.out_dims = self._placed(place, shapes_of(outputs), self.part.records, all)
        leaves, spec = pytree.tree_flatten(output)
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        tapped = Tap.apply(self._anchor, self._call(frame, args, kwargs), *outputs)  # type: ignore[no-untyped-call]
        for k, value in zip(places, tapped, strict=True):
            leaves[k] = value
        return pytree.tree_unflatten(leaves, spec)

    def _refuse_randomness(self, frame: Frame) -> None:
        """The generic rule computes a module again, which must give the same values."""
        now = random_state(frame.module) if frame.random_state else []
        if any(not torch.equal(then, new) for then, new in zip(frame.random_state, now, strict=True)):
            raise UnsupportedModule(
                f"module {self._names[frame.module]!r} has parameters of its own and draws random numbers (dropout) in "
                "its forward, so its gradient per record cannot be computed again. Move the parameter into a small "
                "module of its own, or turn the randomness off."
            )

    def _call(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        own, turned_off = self._own[frame.module], set(map(id, frame.turned_off))
        wanted = {local: name for local, name in own.items() if id(self.parameters[name]) in turned_off}
        part = self.part
        if part is not None:
            for name in wanted.values():
                part.uses[name] = part.uses.get(name, 0) + 1
        leaves, spec = pytree.tree_flatten((args, kwargs))
        name = self._names[frame.module]
        return Call(self._receive, part, frame.module, name, wanted, frame.dims, frame.out_dims, leaves, spec)

    def _receive(self, call: Call, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        """A tap's gradient has arrived: make the pieces of it."""
        part = self._current(call)
        if not part.begun:
            part.begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self._complete)
        if part.records == 0:
            return
        args, kwargs = call.rebuild(tensors)
        use = Use(call.module, args, kwargs, call.dims, call.out_dims, tuple(call.wanted), part.records)
        grads = tuple(grad.movedim(dim or 0, 0) for grad, dim in zip(grads, call.out_dims, strict=True))
        self._paused = True
        try:
            pieces = self.rules[call.name](use, grads)
        finally:
            self._paused = False
        for local, name in call.wanted.items():
            part.pieces.setdefault(name, []).append(pieces[local])
            if part.uses[name] == 1:
                pieces[local].sq_norms  # noqa: B018  now, while the buffers are in the cache

    def _current(self, call: Call) -> Part:
        if torch.is_grad_enabled():
            raise Misuse(
                "backward(create_graph=True) is not supported: gradients of gradients have no bound per record."
            )
        part = self.part
        if part is None or call.part is not part:
            raise Misuse(
                "backward() on a batch that did not come from private.loader, or not on its newest one: the privacy "
                "analysis holds for Poisson batches only. Iterate over private.loader and backward each batch before "
                "asking for the next; evaluate under torch.no_grad()."
            )
        if part.done:
            raise Misuse(
                "a second backward() on the same records: their gradients would be clipped apart and count twice. Add "
                "the losses and call backward() once, or split the batch with private.loader.microbatches(n)."
            )
        return part

    def _complete(self) -> None:
        part = self.part
        if part is None or part.done:
            return
        part.done = True
        self._on_complete(part)
        part.pieces.clear()

    def _place(self, module: nn.Module) -> Place:
        name = self._names[module]
        self._calls[name] = self._calls.get(name, 0) + 1
        return Place(name, self._calls[name])


def _refuse_foreign_rows(inputs: Any, records: int) -> None:
    shapes = shapes_of(inputs)
    if shapes and not any(records in shape for shape in shapes):
        raise Misuse(
            "the model's rows are not the batch's records: no input has one row for each. Give it what private.loader "
            "handed out, as it is; split a batch with private.loader.microbatches(n), and use other data under "
            "torch.no_grad()."
        )


def _shared(place: Place, shapes: Shapes, records: int) -> CliplessError:
    got = ", ".join(written(shape, records) for shape in shapes) or "no tensor"
    return UnsupportedModule(
        f"module {place.name!r} has {got} as {place.side} for a batch of B records: its rows are not the records, so their "
        "gradients cannot be told apart. Give it one row per record, in the first dimension (for positions: "
        "positions.expand(len(x), -1)); split a batch with private.loader.microbatches(n), and use other data under "
        "torch.no_grad()."
    )
