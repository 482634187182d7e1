"""The receiver: what happens when the gradient at a tap arrives in the backward pass.

With the input that the tap remembers, the module's layer rule makes pieces of it. A parameter whose pieces are all there
is handed on at once, so that its buffers can be dropped while the backward pass goes on.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipless.errors import CliplessError, Misuse
from clipless.grads.checks import ROOT, Trial, gradients_set_aside, leaves_of
from clipless.grads.entry import Entry
from clipless.grads.frames import Part, hidden_output, interrupted, modes_changed, not_its_own, rounded_mean, used_again
from clipless.grads.layout import Dims
from clipless.grads.pieces import Piece
from clipless.grads.rules import LayerRule, Use
from clipless.grads.shared import Crossing
from clipless.grads.tap import Busy, Call


@dataclass
class Output:
    """The output of the outermost module, as a place where gradients arrive."""

    entry: Entry | None
    out_dims: Dims
    owner: str = ROOT
    unsure: bool = False

    def settle(self, dims: Dims) -> None:
        """Refuses records that lie elsewhere than the first batch, which was square, has made believe."""
        if dims != self.out_dims:
            raise Misuse(
                "the first batch has as many positions as records, and the records do not lie along the first dimension of "
                "the model's input: give it the records first, or begin with another batch."
            )


class Receiver:
    """Collects every parameter's pieces for the open part.

    `on_parameter(part, name, pieces)` is called once for each parameter that was reached, `on_complete(part)` when the
    backward pass is over. While `busy`, modules are run by rules, and hooks must let them pass. While there is a `trial`,
    what arrives is for a check alone.
    """

    def __init__(
        self, on_parameter: Callable[[Part, str, list[Piece]], None], on_complete: Callable[[Part], None]
    ) -> None:
        self.rules: dict[str, LayerRule] = {}
        self.parameters: Mapping[str, nn.Parameter] = {}
        self.modules: list[nn.Module] = []
        self.part: Part | None = None
        self.busy = Busy()
        self.trial: Trial | None = None
        self._on_parameter = on_parameter
        self._on_complete = on_complete

    def call(self, call: Call, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        """The gradient of a module's output has arrived."""
        part = self._current(call)
        if part.records == 0:
            return
        wanted = self._look(part, call, grads)
        args, kwargs, kept = call.rebuild(tensors)
        if not wanted and kept is None:
            return
        if self.trial is not None and kept is not None:
            kept = kept.copied()
        use = Use(call.module, args, kwargs, call.dims, call.out_dims, tuple(call.wanted), part.records, kept)
        grads = tuple(grad.movedim(dim, 0) if dim else grad for grad, dim in zip(grads, call.out_dims, strict=True))
        self.busy.now = True
        try:
            pieces = self.rules[call.owner](use, grads)
        finally:
            self.busy.now = False
        for local, name in call.wanted.items():
            if local not in pieces:
                raise not_its_own(name, call.module)
        if wanted:
            # The cheap ones first: the last one that a group waits for can be clipped without being held.
            self._take(part, call, [(call.wanted[local], pieces[local]) for local in reversed(list(call.wanted))])

    def crossing(self, crossing: Crossing, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        """The gradient of an operation on shared tensors has arrived."""
        part = self._current(crossing)
        if part.records and self._look(part, crossing, grads):
            self._take(part, crossing, crossing.pieces(tensors, grads))

    def output(self, part: Part, entry: Entry, grads: tuple[Tensor | None, ...]) -> None:
        """The gradient of the outermost module's output has arrived, in a pass that is checked."""
        self._refuse_other(part)
        assert part.check is not None
        dims = tuple(dim for dim, grad in zip(entry.out_dims, grads, strict=True) if grad is not None)
        root = Output(entry, dims, unsure=entry.square)
        arrived = [grad for grad in grads if grad is not None]
        apart = all(dim is not None for dim in root.out_dims)
        if self.trial is not None:
            if apart and self.trial.totals is None:
                self.trial.hear(root, arrived)
            elif apart and not part.check.at_losses:
                part.check.compare(root, arrived)
            return
        self._refuse_modes(part)
        self.begin(part)
        if part.check.at_losses and apart:
            part.check.compare(root, arrived)
        part.check.at_output(entry, grads)

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Inside, hooks let modules pass."""
        self.busy.now, before = True, self.busy.now
        try:
            yield
        finally:
            self.busy.now = before

    def run(self, outputs: list[Tensor], grads: list[Tensor], anchors: list[Tensor], trial: Trial) -> None:
        """A backward pass from these outputs to the taps on these anchors. The graph is kept, and gradients go to the
        trial."""
        part, before = self.part, self.trial
        assert part is not None
        uses, late = dict(part.uses), part.late
        self.trial = trial
        try:
            torch.autograd.grad(outputs, anchors, grads, retain_graph=True, allow_unused=True)
        except RuntimeError as refused:
            if isinstance(refused, CliplessError) or "use_reentrant" not in str(refused):
                raise
            trial.forget()
            with gradients_set_aside(leaves_of(outputs)):
                torch.autograd.backward(outputs, grads, retain_graph=True)
        finally:
            self.trial, part.uses, part.late = before, uses, late

    def _look(self, part: Part, tap: Call | Crossing, grads: tuple[Tensor, ...]) -> bool:
        """Check the gradients that arrived, if this is for now; whether pieces are to be made of them."""
        if part.averaged and any(grad.dtype.itemsize < 4 for grad in grads):
            raise rounded_mean()
        if tap.entry is not None and tap.entry.hidden:
            raise hidden_output(tap.entry.name)
        check, trial = part.check, self.trial
        if trial is None:
            if check is not None and check.at_losses:
                check.compare(tap, grads)
            return True
        if trial.totals is None:
            trial.hear(tap, grads)
            return False
        if check is not None and not check.at_losses:
            check.compare(tap, grads)
        return True

    def _take(self, part: Part, tap: Call | Crossing, pieces: list[tuple[str, Piece]]) -> None:
        if self.trial is not None:
            for name, piece in pieces if tap.entry in (None, self.trial.adds_up) else ():
                self.trial.add(name, piece, self.parameters[name])
            return
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
        part = self._refuse_other(call.part)
        self._refuse_modes(part)
        if self.trial is None:
            self.begin(part)
            if part.task != torch._C._current_graph_task_id() and not part.late:
                raise interrupted(again=False)
        return part

    def _refuse_other(self, origin: object) -> Part:
        """The open part, if that is where a gradient comes from for the first time."""
        part = self.part
        if part is None or origin is not part:
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

    def _refuse_modes(self, part: Part) -> None:
        if not part.begun and part.modes and part.modes != [module.training for module in self.modules]:
            raise modes_changed()

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
