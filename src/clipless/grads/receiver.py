"""The receiver: what happens when the gradient at a tap arrives in the backward pass.

With the input that the tap remembers, the module's layer rule makes pieces of it. A parameter whose pieces are all there
is handed on at once, so that its buffers can be dropped while the backward pass goes on.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from clipless.errors import Misuse
from clipless.grads.frames import Part, interrupted, not_its_own, used_again
from clipless.grads.pieces import Piece
from clipless.grads.rules import LayerRule, Use
from clipless.grads.shared import Crossing
from clipless.grads.tap import Call


class Receiver:
    """Collects every parameter's pieces for the open part.

    `on_parameter(part, name, pieces)` is called once for each parameter that was reached, `on_complete(part)` when the
    backward pass is over. While `busy`, modules are run by rules, and hooks must let them pass.
    """

    def __init__(
        self, on_parameter: Callable[[Part, str, list[Piece]], None], on_complete: Callable[[Part], None]
    ) -> None:
        self.rules: dict[str, LayerRule] = {}
        self.part: Part | None = None
        self.busy = False
        self._on_parameter = on_parameter
        self._on_complete = on_complete

    def call(self, call: Call, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        """The gradient of a module's output has arrived."""
        part = self._current(call)
        if part.records == 0:
            return
        args, kwargs, kept = call.rebuild(tensors)
        use = Use(call.module, args, kwargs, call.dims, call.out_dims, tuple(call.wanted), part.records, kept)
        grads = tuple(grad.movedim(dim, 0) if dim else grad for grad, dim in zip(grads, call.out_dims, strict=True))
        self.busy = True
        try:
            pieces = self.rules[call.name](use, grads)
        finally:
            self.busy = False
        for local, name in call.wanted.items():
            if local not in pieces:
                raise not_its_own(name, call.module)
        # The cheap ones first: the last one that a group waits for can be clipped without being held.
        self._take(part, [(call.wanted[local], pieces[local]) for local in reversed(list(call.wanted))])

    def crossing(self, crossing: Crossing, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        """The gradient of an operation on shared tensors has arrived."""
        part = self._current(crossing)
        self._take(part, crossing.pieces(tensors, grads))

    def _take(self, part: Part, pieces: list[tuple[str, Piece]]) -> None:
        for name, piece in pieces:
            if name in part.arrived:
                raise used_again(name)
            part.pieces.setdefault(name, []).append(piece)
        for name in dict.fromkeys(name for name, _ in pieces):
            if not part.late and len(part.pieces[name]) == part.uses[name]:
                self._hand_on(part, name)

    def _hand_on(self, part: Part, name: str) -> None:
        part.arrived.add(name)
        self._on_parameter(part, name, part.pieces.pop(name))

    def _current(self, call: Call | Crossing) -> Part:
        """The open part, if that is where the gradient comes from; its completion is noted when the first one arrives."""
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
        self.begin(part)
        if part.task != torch._C._current_graph_task_id() and not part.late:
            raise interrupted(again=False)
        return part

    def begin(self, part: Part) -> None:
        """A backward pass is running, the outermost one if there are several: its end completes the part."""
        if not part.begun:
            part.begun, part.task = True, torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._complete)

    def _complete(self) -> None:
        part = self.part
        if part is None or part.done:
            return
        for name in list(part.pieces):
            self._hand_on(part, name)
        self._on_complete(part)
        part.done = True
