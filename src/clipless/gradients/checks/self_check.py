"""Which forward passes are checked, what is noted of them, and the tap on their output from which the checks start."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from clipless.clipped import LossFunction
from clipless.gradients.checks.leaves import LossGraph
from clipless.gradients.checks.loss_inside import refuse_coupled
from clipless.gradients.checks.passes import ForwardPass, Rerun
from clipless.gradients.checks.reach import code_of
from clipless.gradients.checks.records import RecordsCheck
from clipless.gradients.checks.scalar_loss import refuse_scalar
from clipless.gradients.checks.seeds import sketch
from clipless.gradients.checks.totals import refuse_lost
from clipless.gradients.checks.whole_step import WholeStep
from clipless.gradients.records import Reading
from clipless.gradients.trees import Dims
from clipless.heap import freed_memory_returned
from clipless.random_state import own_generators
from clipless.sampling.loader import DrawnPart
from clipless.sampling.rows import tensors_of
from clipless.sampling.sizes import ExtremeSizes
from clipless.torch_internals import BackwardCalls, pytree


class CheckSchedule:
    """When a run checks itself, besides at whatever is new: at the first two batches that can show whether records mix, then
    at the fourth, the eighth and so on. Batches without records do not count.

    >>> schedule = CheckSchedule()
    >>> [schedule.due(records) for records in (0, 1, 5, 5, 5, 5, 5, 5, 5, 5)]
    [False, True, True, True, False, True, False, False, False, True]
    """

    def __init__(self) -> None:
        self._met = 0

    def due(self, records: int) -> bool:
        """Whether to check a part of so many records."""
        if records > 1:
            self._met += 1
        return records > 0 and self._met & (self._met - 1) == 0


class LargestSizes:
    """The sizes of the batches' tensors so far. One that is larger than all before, such as a longer sequence, is new.

    >>> sizes = LargestSizes()
    >>> [sizes.grew(torch.zeros(4, length)) for length in (3, 2, 3, 5, 4)]
    [True, False, False, True, False]
    """

    def __init__(self) -> None:
        self._known: set[tuple[torch.Size, ...]] = set()
        self._largest: dict[tuple[int, int], int] = {}

    def grew(self, batch: Any) -> bool:
        """Whether a tensor is larger along any dimension but the first than it ever was."""
        shapes = tuple([tensor.shape[1:] for tensor in tensors_of(batch)])
        if shapes in self._known:
            return False
        if len(self._known) < 10_000:
            self._known.add(shapes)
        sizes = {(k, dim): size for k, shape in enumerate(shapes) for dim, size in enumerate(shape)}
        new = any(size > self._largest.get(place, -1) for place, size in sizes.items())
        self._largest |= {place: max(size, self._largest.get(place, -1)) for place, size in sizes.items()}
        return new


class Met:
    """What was met so far, on one record or on several. One record does not show whether records mix.

    >>> met = Met()
    >>> [met.add("a", records) for records in (1, 1, 2, 1, 3)]
    [True, False, True, False, False]
    """

    def __init__(self) -> None:
        self._alone: set[object] = set()
        self._together: set[object] = set()

    def has(self, thing: object, records: int) -> bool:
        """Whether this was met, on several records if there are several now."""
        return thing in self._together or (records == 1 and thing in self._alone)

    def add(self, thing: object, records: int) -> bool:
        """Note that it was met. Returns whether it is new."""
        new = not self.has(thing, records)
        (self._together if records > 1 else self._alone).add(thing)
        return new


def kind_of(function: LossFunction) -> object:
    """The code of a function, by which it is known: one that is defined in the loop is not new in every step."""
    return code_of(function) or type(function)


class Checked(Protocol):
    """A micro-batch, as far as its check is concerned."""

    records: int
    averaged: bool | None
    due: bool
    check: RecordsCheck | None
    whole: WholeStep | None
    by_function: bool
    done: bool


class SelfCheck:
    """If it is `active`, passes that are due, or that go through something new, are checked.

    A step through a model is a call of a module, after another one, on inputs of certain ranks. Steps are `seen` once they
    were in a check of the records, and `compared` once they were also in a check of the totals, which needs a pass that was
    noted from its beginning.

    `run` makes a backward pass whose gradients go to a trial, `receive` gets the gradients that arrive at a checked output,
    and inside `silenced()` modules run plainly.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        run: Callable[..., None],
        receive: Callable[..., None],
        silenced: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.active = False
        self._schedule = CheckSchedule()
        self._generators = own_generators(modules)
        self._run, self._receive, self._silenced = run, receive, silenced
        self._seen: set[object] = set()
        self._compared: set[object] = set()
        self._checked: list[Checked] = []
        self._waiting: list[ForwardPass] = []
        self._backward_calls, self._looking = BackwardCalls(), False
        self._functions: list[tuple[WholeStep, set[object]]] = []
        self._met, self._paths, self._sizes, self._extremes = Met(), Met(), LargestSizes(), ExtremeSizes()
        self._path_owing = False
        self._told: set[str] = set()
        self._number = 0

    def due(self, records: int) -> bool:
        """Whether a new micro-batch, of so many records, is checked in any case."""
        if self._checked:
            self._backward_calls.forget()
            self._collect()
        self._number += 1
        return self.active and self._schedule.due(records)

    @property
    def _owing(self) -> bool:
        """Whether passes went through something of which only the records were checked."""
        return len(self._seen) > len(self._compared)

    def begin_function(
        self, function: LossFunction, model: nn.Module, batch: Any, micro: Checked, drawn: DrawnPart | None
    ) -> None:
        """A function from batch to losses is about to be called. Its check is kept if one is due, if the function is new or
        its passes went through something new, if its batch is larger along some dimension than all before, or if a record
        is shorter or longer."""
        if not (self.active and micro.records):
            return
        new = self._met.add(kind_of(function), micro.records) | self._sizes.grew(batch) | self._path_owing
        if drawn is not None:
            new |= self._extremes.widened(drawn.indices, drawn.sizes)
            drawn = replace(drawn, others=self._extremes.records)
        if micro.due or new or self._owing:
            micro.due, self._path_owing = True, False
            shared = self._generators, self._told
            micro.whole = WholeStep(function, model, batch, micro.records, self._number, drawn, *shared)
            self._start(micro)

    def is_new_path(self, graph: LossGraph | None, micro: Checked, repeatable: bool) -> bool:
        """Whether the losses were computed along a path that has not been checked, are not checked now, and can be computed
        again; if they cannot, the next micro-batch is checked."""
        if not self.active or graph is None:
            return False
        if micro.whole is not None:
            self._paths.add(graph.path, micro.records)
        new = not self._paths.has(graph.path, micro.records)
        self._path_owing |= new and not repeatable
        return new and repeatable

    def _start(self, micro: Checked) -> RecordsCheck:
        """The check of a micro-batch, which begins if it has not yet."""
        if micro.check is None:
            micro.check = RecordsCheck(micro.records, self._number, self._run)
            self._checked.append(micro)
        return micro.check

    def begin(
        self, module: nn.Module, name: str, inputs: tuple[Any, Any], micro: Checked, reading: Reading, square: bool
    ) -> ForwardPass:
        """A pass through the outermost module begins."""
        whole = micro.whole is not None and not micro.whole.blind
        closely = self.active and micro.records > 0 and not whole and (micro.due or self._owing)
        rerun = Rerun.of(module, inputs, self._generators) if closely else None
        return ForwardPass(name, micro.records, reading, square, rerun=rerun)

    def wanted(self, forward_pass: ForwardPass, micro: Checked) -> bool:
        """Whether a pass that has come to its end is checked."""
        if forward_pass.routed:
            return True
        known = self._compared if forward_pass.rerun else self._seen
        return self.active and (micro.due or not forward_pass.steps <= known)

    def end(self, forward_pass: ForwardPass, micro: Checked, output: Any, dims: Dims) -> Any:
        """The output of a pass that is checked, with a tap on it; `dims` are those of its floating-point tensors."""
        leaves, spec = pytree.tree_flatten(output)
        floating = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        places = [k for k in floating if leaves[k].requires_grad]
        if not places:
            forward_pass.hidden = True
            return output
        check = self._start(micro)
        check.forward_passes.append(forward_pass)
        check.names_rows |= forward_pass.routed
        forward_pass.places = [floating.index(k) for k in places]
        forward_pass.outputs = tuple(leaves[k] for k in places)
        forward_pass.out_dims = tuple(dims[k] for k in forward_pass.places)
        pairs = zip(forward_pass.outputs, forward_pass.out_dims, strict=True)
        forward_pass.values = [sketch(output, dim or 0) for output, dim in pairs]
        forward_pass.drawn = forward_pass.rerun.now() if forward_pass.rerun else None
        receive = partial(self._arrived, micro, forward_pass)
        forward_pass.tapped = OutputTap.apply(receive, *forward_pass.outputs)  # type: ignore[no-untyped-call]
        if micro.whole is None:
            self._backward_calls.await_next(partial(self._refuse_loss, micro))
        for k, value in zip(places, forward_pass.tapped, strict=True):
            leaves[k] = value
        return pytree.tree_unflatten(leaves, spec)

    def _refuse_loss(self, micro: Checked, tensors: Any) -> None:
        """`backward()` was called after a checked pass: if on one number for the whole batch, look at what it tells."""
        loss = tensors[0] if isinstance(tensors, Sequence) and len(tensors) == 1 else tensors
        check = micro.check
        whole = check is not None and not check.at_losses and not micro.done and not micro.by_function
        if whole and micro.averaged is not None and isinstance(loss, Tensor) and loss.dim() == 0:
            assert check is not None
            self._looking = True
            try:
                refuse_scalar(loss, check.forward_passes, micro.records, self._number, micro.averaged)
            finally:
                self._looking = False

    def _arrived(self, micro: Checked, forward_pass: ForwardPass, grads: tuple[Tensor | None, ...]) -> None:
        """Gradients have come to an output, which may be that of a loss module: not if only the loss is looked at."""
        if not self._looking:
            self._receive(micro, forward_pass, grads)

    def forget(self) -> None:
        """A new logical batch begins: compare nothing of the last."""
        if self._checked:
            self._backward_calls.forget()
        self._checked, self._waiting, self._functions = [], [], []

    def compare(self, parameters: dict[str, nn.Parameter], live: dict[str, nn.Parameter]) -> int:
        """Raise if plain autograd finds another gradient for the passes that wait, or if some records' outputs depend
        on other records. Returns the number of passes. `live` are the objects that the model holds for the parameters
        now."""
        if self._checked:
            self._collect()
        waiting, self._waiting = self._waiting, []
        functions, self._functions = self._functions, []
        for whole, steps in functions:
            with self._silenced(), freed_memory_returned():
                whole.refuse(parameters, live)
            self._compared |= steps
        for forward_pass in waiting:
            if forward_pass.rerun is not None:
                with self._silenced(), freed_memory_returned():
                    refuse_coupled(forward_pass, forward_pass.averaged)
                    refuse_lost(forward_pass, parameters, live)
                self._compared |= forward_pass.steps
        return len(waiting)

    def _collect(self) -> None:
        """Where the backward pass is over, so is the check of the records; the totals wait to be compared."""
        for micro in self._checked:
            if micro.whole is not None and micro.check is not None and micro.done:
                passes = micro.check.forward_passes
                self._functions.append((micro.whole, {step for one in passes for step in one.steps}))
            for forward_pass in micro.check.forward_passes if micro.check and micro.done else ():
                if forward_pass.grads is not None:
                    self._seen |= forward_pass.steps
                    forward_pass.outputs, forward_pass.tapped = (), ()
                    forward_pass.averaged = bool(micro.averaged)
                    self._waiting.append(forward_pass)
        self._checked = []


class OutputTap(torch.autograd.Function):
    """Identity on the outputs of the outermost module in a checked pass: no gradient goes further before the check is done.
    Outputs at which no gradient arrives have None."""

    @staticmethod
    def forward(ctx: Any, receive: Callable[[tuple[Tensor | None, ...]], None], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.receive(grads)
        return (None, *grads)
