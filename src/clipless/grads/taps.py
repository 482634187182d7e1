"""Taps: where they are put, on outputs of modules and on operations, and what they hang on."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from clipless.errors import UnsupportedModule
from clipless.grads.entry import Entry
from clipless.grads.frames import Frame, Part, refuse_hidden, refuse_packed, shared_input
from clipless.grads.layout import Dims, Place, Shapes, broken_records, plain_tensors, shapes_of
from clipless.grads.receiver import Receiver
from clipless.grads.rules import generic
from clipless.grads.rules.generic import differentiable
from clipless.grads.shared import Crossing
from clipless.grads.tap import Call, Tap, flattened
from clipless.grads.ways import Ways


class Taps:
    """Puts taps on what forward passes compute. `entry` is the pass through the outermost module that is going on; if it
    `looks_at_data`, the part is told which records' data are not finite."""

    def __init__(self, receiver: Receiver, own: Mapping[nn.Module, Mapping[str, str]]) -> None:
        self.entry: Entry | None = None
        self.looks_at_data = False
        self._receiver = receiver
        self._own = own
        self._anchor = torch.zeros((), requires_grad=True)

    def on(self, frame: Frame, ways: Ways, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The output of a module with parameters that were turned off, tapped."""
        if self._receiver.rules[frame.place.name] is generic:
            refuse_packed(frame.place.name, (args, kwargs, output))
            refuse_hidden(frame.place.name, output)
        if self._receiver.part is not None and self._receiver.part.records > 0:
            shapes = shapes_of(output, floating=True)
            frame.out_dims = placed(ways, frame.place.output(), shapes, self._receiver.part.records, all)
            frame.unsure |= not ways.layout.sure(frame.place.output(), shapes)
            if self.looks_at_data:
                self._look(frame, (args, kwargs), self._receiver.part)
        call = self._call(frame, ways, args, kwargs)
        if isinstance(output, Tensor) and output.is_floating_point():
            if self._receiver.part is not None:
                self._receiver.part.tapped += output.nbytes
            return Tap.apply(self._hold(), call, output)[0]  # type: ignore[no-untyped-call]
        leaves, spec = pytree.tree_flatten(output)
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        tapped = Tap.apply(self._hold(), call, *differentiable(output))  # type: ignore[no-untyped-call]
        for k, value in zip(places, tapped, strict=True):
            leaves[k] = value
        return pytree.tree_unflatten(leaves, spec)

    def _look(self, frame: Frame, inputs: tuple[Any, Any], part: Part) -> None:
        """Note the records whose data are not finite where these enter a module, before any parameter has touched them. In
        a module without a rule -inf may be of a mask."""
        masks = self._receiver.rules[frame.place.name] is generic
        tensors = plain_tensors(inputs) or [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        for tensor, dim in zip(tensors, frame.dims, strict=True):
            broken = broken_records(tensor, dim, part.records, masks)
            if broken is not None:
                part.broken = broken if part.broken is None else part.broken | broken

    def _call(self, frame: Frame, ways: Ways, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        own, turned_off = self._own[frame.module], set(map(id, frame.turned_off))
        wanted = {local: name for local, name in own.items() if id(self._receiver.parameters[name]) in turned_off}
        self._count(wanted.values())
        leaves, spec = flattened(args, kwargs, frame.takeover.kept if frame.takeover else None)
        name, receive = frame.place.name, self._receiver.call
        where = (frame.dims, frame.out_dims)
        call = Call(receive, self._receiver.part, self.entry, frame.module, name, wanted, *where, leaves, spec)
        if frame.unsure:
            call.unsure, call.shapes = True, shapes_of((args, kwargs))
            call.learn = partial(ways.layout.learn, frame.place)
        return call

    def _count(self, names: Iterable[str]) -> None:
        """One more tap for each of these parameters."""
        part = self._receiver.part
        if part is not None:
            for name in names:
                part.uses[name] = part.uses.get(name, 0) + 1
            if torch._C._current_graph_task_id() != -1:
                part.late = True
                if self._receiver.trial is None:
                    self._receiver.begin(part)

    def crossing(self, crossing: Crossing, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        """The results of an operation in which parameters met the records, tapped."""
        crossing.part, crossing.entry, crossing.receive = self._receiver.part, self.entry, self._receiver.crossing
        self._count(root.name for shared in crossing.shared for root in shared.roots)
        return Tap.apply(self._hold(), crossing, *outputs)  # type: ignore[no-untyped-call]

    def _hold(self) -> Tensor:
        """The leaf that taps hang on: that of the forward pass, or a common one for what is computed again."""
        return self._anchor if self.entry is None else self.entry.anchor


def placed(ways: Ways, place: Place, shapes: Shapes, records: int, enough: Callable[[Iterable[bool]], bool]) -> Dims:
    """Where the records lie in each of the tensors; refused if that is not enough to tell records apart."""
    try:
        dims = ways.layout.dims(place, shapes, records)
        if not enough(dim is not None for dim in dims):
            raise shared_input(place, shapes, records)
    except UnsupportedModule:
        ways.forget()
        raise
    return dims
