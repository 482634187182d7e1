"""The receiver: what happens when the gradient at a tap arrives in the backward pass.

From it and the input that the tap has kept, the module's layer rule computes the per-sample gradients. Once all uses of a
parameter have arrived, its gradients are passed on, so that their memory can be freed during the backward pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor, nn

from clipless.errors import CliplessError, Misuse
from clipless.gradients.capture import messages
from clipless.gradients.capture.calls import Call
from clipless.gradients.capture.crossing import Crossing
from clipless.gradients.capture.hooks import Hooks
from clipless.gradients.capture.micro_batch import MicroBatch
from clipless.gradients.capture.rows import rows_rule
from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.checks.records import ROOT, gradients_set_aside, leaves_of
from clipless.gradients.checks.trial import Trial
from clipless.gradients.forms import Form, Routed, by_record
from clipless.gradients.layers import Use
from clipless.gradients.layers.rule import at_least_float32
from clipless.gradients.records import TROUBLES
from clipless.gradients.recurrent.sequences import by_sequence
from clipless.gradients.trees import Dims
from clipless.torch_internals import current_graph_task, execution_engine

TRAINING = attrgetter("training")


class Sink(Protocol):
    """Takes per-sample gradients."""

    def take(self, micro: MicroBatch, complete: Iterable[tuple[str, list[Form]]]) -> None:
        """The per-sample gradients of some parameters, one form for every use of each."""

    def finish(self, micro: MicroBatch) -> None:
        """The backward pass is over."""

    def restart(self) -> None:
        """Discard what was taken of the open micro-batch; raises if that is not possible."""


@dataclass
class Arrivals:
    """What has arrived of the open micro-batch. `task` is autograd's id of the running backward pass, the outermost one if
    they are nested."""

    forms: dict[str, list[Form | Routed]] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    task: int = -1


@dataclass
class Output:
    """The output of the outermost module, as a tap for the checks."""

    forward_pass: ForwardPass | None
    out_dims: Dims
    owner: str = ROOT
    unsure: bool = False
    rows: int = 0
    record: Tensor | None = None

    def settle(self, dims: Dims) -> None:
        """Raise unless the records lie where they were assumed to lie in a first batch that was square."""
        if dims != self.out_dims:
            raise Misuse(
                "the first batch has as many positions as records, and the records do not lie along the first dimension of "
                "the model's input: give it the records first, or begin with another batch."
            )


class Receiver:
    """Collects the per-sample gradients of the open micro-batch for a sink.

    While a rule runs, hooks are off, since it may run modules. During a `trial`, gradients are used for a check and not
    summed.
    """

    def __init__(self, hooks: Hooks, modules: list[nn.Module], parameters: dict[str, nn.Parameter], sink: Sink) -> None:
        self.micro: MicroBatch | None = None
        self.trial: Trial | None = None
        self._arrivals = Arrivals()
        self._hooks, self._modules, self._parameters, self._sink = hooks, modules, parameters, sink

    def open(self, micro: MicroBatch | None) -> None:
        """Gradients that arrive from now on belong to this micro-batch, or to none."""
        self.micro, self._arrivals = micro, Arrivals()

    def restart(self) -> MicroBatch:
        """Start the open micro-batch over after an interrupted backward pass."""
        assert self.micro is not None
        self._sink.restart()
        before = self.micro
        again = MicroBatch(before.records, before.averaged, before.scale, before.due)
        again.by_function, again.whole = before.by_function, before.whole
        self.open(again)
        return again

    def expect(self, names: Iterable[str]) -> None:
        """Wait for one more gradient of each of these parameters, which have just been used."""
        micro = self.micro
        if micro is None:
            return
        for name in names:
            micro.uses[name] = micro.uses.get(name, 0) + 1
        if current_graph_task() != -1:
            micro.late = True
            if self.trial is None:
                self.begin()

    def call(self, call: Call, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        """The gradient of a module's output has arrived."""
        micro = self._current(call)
        if micro.records == 0:
            return
        args, kwargs, saved = (tensors, {}, None) if call.spec is None else call.unflatten(tensors)
        wanted = self._check_gradients(micro, call, by_sequence(args, grads) if call.layer.is_recurrent else grads)
        if not wanted and saved is None:
            return
        if self.trial is not None and saved is not None:
            saved = saved.copied()
        first, float32 = (tensors or grads)[0], torch.float32
        if not (call.dims == call.out_dims == (0,) and first.dtype is grads[0].dtype is float32):
            first, grads = _records_first(call, first, grads)
        records = call.rows or micro.records
        use = Use(call.layer.module, first, args, kwargs, call.dims, call.out_dims, tuple(call.wanted), records, saved)
        listener, self._hooks.listener = self._hooks.listener, None
        try:
            forms = rows_rule(call, use, grads, micro.records) if call.rows else call.layer.rule(use, grads)
        except TROUBLES as trouble:
            if isinstance(trouble, CliplessError) or not call.layer.is_generic:
                raise
            raise messages.fails_alone(call.owner, trouble) from trouble
        finally:
            self._hooks.listener = listener
        named: list[tuple[str, Form | Routed]] = []
        for local in reversed(call.wanted):
            if local not in forms:
                raise messages.not_its_own(call.wanted[local], call.layer.module)
            # Cheap ones first: the last form of a group is clipped in chunks and need not be held as a whole.
            named.append((call.wanted[local], forms[local]))
        if wanted:
            self._take(micro, call, named)

    def crossing(self, crossing: Crossing, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        """The gradient of an operation on traced tensors has arrived."""
        micro = self._current(crossing)
        if micro.records and self._check_gradients(micro, crossing, grads):
            self._take(micro, crossing, crossing.forms(tensors, grads, micro.records))

    def output(self, micro: MicroBatch, forward_pass: ForwardPass, grads: tuple[Tensor | None, ...]) -> None:
        """The gradient of the outermost module's output has arrived, in a pass that is checked."""
        self._refuse_other(micro)
        assert micro.check is not None
        dims = tuple(dim for dim, grad in zip(forward_pass.out_dims, grads, strict=True) if grad is not None)
        root = Output(forward_pass, dims, unsure=forward_pass.square)
        arrived = [grad for grad in grads if grad is not None]
        apart = all(dim is not None for dim in root.out_dims)
        if self.trial is not None:
            if apart and self.trial.totals is None:
                self.trial.hear(root, arrived)
            elif apart and not micro.check.at_losses:
                micro.check.compare(root, arrived)
            return
        self.begin()
        if micro.check.at_losses and apart:
            micro.check.compare(root, arrived)
        micro.check.at_output(forward_pass, grads)

    def run(self, outputs: list[Tensor], grads: list[Tensor], anchors: list[Tensor], trial: Trial) -> None:
        """Run a backward pass from these outputs to the taps on these anchors, for a trial. The graph is kept."""
        micro, before = self.micro, self.trial
        assert micro is not None
        self._refuse_modes(micro)
        uses, late = dict(micro.uses), micro.late
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
            self.trial, micro.uses, micro.late = before, uses, late

    def begin(self) -> None:
        """Complete the micro-batch when the running backward pass ends, the outermost one if they are nested."""
        micro = self.micro
        assert micro is not None
        if not micro.begun:
            self._refuse_modes(micro)
            if micro.averaged is None:
                raise messages.unstated_reduction()
            micro.begun, self._arrivals.task = True, current_graph_task()
            execution_engine.queue_callback(self._complete)

    def _current(self, tap: Call | Crossing) -> MicroBatch:
        """The open micro-batch; raises if the gradient comes from another one."""
        if torch.is_grad_enabled():
            raise Misuse(
                "backward(create_graph=True) is not supported: gradients of gradients, also inside the model (forces, "
                "gradient penalties), reach the parameters past the taps and have no bound per record. Leave such terms "
                "out of model and loss."
            )
        micro, arrivals = self.micro, self._arrivals
        if micro is None or tap.micro is not micro or micro.done:
            self._refuse_other(tap.micro)
        assert micro is not None
        if self.trial is None:
            if not micro.begun:
                self.begin()
            elif arrivals.task != current_graph_task() and not micro.late:
                raise messages.interrupted(again=False)
        return micro

    def _refuse_other(self, origin: object) -> None:
        """Raise unless `origin` is the open micro-batch, in its first backward pass."""
        if self.micro is None or origin is not self.micro:
            raise Misuse(
                "backward() on a batch that did not come from private.loader, or not on its newest one: the privacy "
                "analysis holds for Poisson batches only. Iterate over private.loader and backward each batch before "
                "asking for the next; evaluate under torch.no_grad()."
            )
        if self.micro.done:
            raise Misuse(
                "a second backward() on the same records: their gradients would be clipped apart and count twice. Add "
                "the losses and call backward() once, or split the batch with private.loader.microbatches(n)."
            )

    def _refuse_modes(self, micro: MicroBatch) -> None:
        if micro.modes and micro.modes != list(map(TRAINING, self._modules)):
            raise messages.modes_changed()

    def _check_gradients(self, micro: MicroBatch, tap: Call | Crossing, grads: tuple[Tensor, ...]) -> bool:
        """Check the gradients that arrived, if a check is active. Returns whether to compute per-sample gradients."""
        if micro.averaged:
            for grad in grads:
                if grad.dtype.itemsize < 4:
                    raise messages.rounded_mean()
        check, trial = micro.check, self.trial
        if tap.forward_pass is not None and tap.forward_pass.hidden:
            raise messages.hidden_output(tap.forward_pass.name)
        if trial is None:
            if check is not None and check.at_losses:
                check.compare(tap, grads)
            if tap.rows and tap.record is None:
                tap.record = self._only_record(micro, tap, grads)
            return True
        if trial.totals is None:
            trial.hear(tap, grads)
            return False
        if check is not None and (check.names_rows or not check.at_losses):
            check.compare(tap, grads)
        return not tap.rows or tap.record is not None

    def _only_record(self, micro: MicroBatch, tap: Call | Crossing, grads: tuple[Tensor, ...]) -> Tensor:
        """The record of each row, if there is only one; raises if there are more, since no seeds have identified them."""
        if micro.records > 1:
            raise messages.unidentified_rows(tap.owner)
        return torch.zeros(tap.rows, dtype=torch.long, device=grads[0].device)

    def _take(self, micro: MicroBatch, tap: Call | Crossing, forms: list[tuple[str, Form | Routed]]) -> None:
        if self.trial is not None:
            for name, form in forms if self.trial.counts(tap.forward_pass) else ():
                self.trial.add(name, form, self._parameters[name])
            return
        arrivals = self._arrivals
        complete: list[tuple[str, list[Form]]] = []
        for name, form in forms:
            if name in arrivals.complete:
                raise messages.used_again(name)
            uses = arrivals.forms.setdefault(name, [])
            uses.append(form)
            if not micro.late and len(uses) == micro.uses[name]:
                arrivals.complete.add(name)
                del arrivals.forms[name]
                complete.append((name, by_record(uses) if micro.routed else uses))  # type: ignore[arg-type]
        if complete:
            self._sink.take(micro, complete)

    def _complete(self) -> None:
        micro, arrivals = self.micro, self._arrivals
        if micro is None or micro.done or not micro.begun:
            return
        if arrivals.forms:
            arrivals.complete.update(arrivals.forms)
            left = {name: arrivals.forms.pop(name) for name in list(arrivals.forms)}
            self._sink.take(micro, [(name, by_record(forms)) for name, forms in left.items()])
        self._sink.finish(micro)
        micro.done = True


def _records_first(call: Call, first: Tensor, grads: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A call's first input and the gradients of its outputs, records first and at least float32, for a layer rule."""
    moved = first.movedim(call.dims[0], 0) if call.dims and call.dims[0] else first
    pairs = zip(grads, call.out_dims, strict=True)
    ours = tuple(at_least_float32(grad.movedim(dim, 0) if dim else grad) for grad, dim in pairs)
    return at_least_float32(moved) if moved.is_floating_point() else moved, ours
