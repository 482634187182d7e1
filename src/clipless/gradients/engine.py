"""The engine: a façade over hooks, receiver, checks and sums."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from clipless.clipped import LossFunction
from clipless.errors import InvalidArgument, InvalidType, Misuse
from clipless.gradients.capture import messages
from clipless.gradients.capture.hooks import Hooks, Tap
from clipless.gradients.capture.micro_batch import MicroBatch
from clipless.gradients.capture.model_map import ModelMap
from clipless.gradients.capture.receiver import Receiver
from clipless.gradients.capture.recorder import Recorder
from clipless.gradients.capture.watch import StateWatch
from clipless.gradients.checks.leaves import LossGraph, refuse_foreign_leaves, rows_among
from clipless.gradients.checks.self_check import OutputTap, SelfCheck
from clipless.gradients.kernels import Kernels
from clipless.gradients.shards import Shards, refuse_sharded
from clipless.gradients.sums import ClippedSums, Factors, Observe
from clipless.partition import Partition
from clipless.sampling.loader import DrawnPart
from clipless.sampling.rows import Given

# Operations at which the model ends, seen from the losses.
STOPS = (Tap._backward_cls, OutputTap._backward_cls)


class Engine:
    """Turns backward passes of an ordinary model into clipped sums.

    After `attach()`, for each logical batch: `clear()`; for each of its micro-batches `open(...)`, then the user's
    forward and backward pass; `refuse_unsound()`; `complete()`. `detach()` removes everything from the model. The sums are
    of the gradients of each record's own loss, whether the loss was a sum or a mean. If it `checks_itself`, passes are
    checked from time to time, and whenever they go through something new.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Partition,
        factors: Factors,
        observe: Observe | None,
        kernels: Kernels,
        checks_itself: bool = False,
        receiver: type[Receiver] = Receiver,
        shards: Shards | None = None,
    ) -> None:
        if shards is None:
            refuse_sharded(model)
        layers, self._shards = ModelMap(model, sharded=shards is not None), shards
        self._map = layers
        self.parameters, self.modules = layers.parameters, layers.modules
        self._hooks = Hooks(layers, root=None if shards is None else shards.root)
        self._sums = ClippedSums(layers, groups, factors, observe, kernels, shards)
        self.receiver = receiver(self._hooks, self.modules, self.parameters, self._sums)
        self._self_check = SelfCheck(self.modules, self.receiver.run, self.receiver.output, self._hooks.silenced)
        self._self_check.active = checks_itself
        self._model, self._watch = model, StateWatch(model)
        self._recorder = Recorder(model, layers, self._hooks, self.receiver, self._self_check, self._watch, shards)
        self._recorder.checks_data = len(groups) > 1
        self._reachable = {id(self._recorder.spare_anchor), *map(id, self.parameters.values())}
        self._device = next((p.device.type for p in self.parameters.values()), "cpu")

    def attach(self) -> None:
        """Register hooks on the model, or raise and leave it unchanged."""
        self._hooks.attach()
        self._recorder.attach()
        self._hooks.listener = self._recorder

    def detach(self) -> None:
        """Remove all hooks from the model."""
        self._recorder.restore()
        if self._shards is not None:
            self._shards.forget()
        self._hooks.detach()
        self._hooks.listener = None

    def intact(self) -> bool:
        """Restore what an interrupted pass has left changed. Returns whether every hook is still registered."""
        self._recorder.restore()
        return self._hooks.intact()

    @property
    def due(self) -> bool:
        """Whether the open micro-batch is to be checked."""
        return self.receiver.micro is not None and self.receiver.micro.due

    @property
    def seen(self) -> int:
        """How many records of the logical batch have gone through backward."""
        return self._sums.seen

    def clear(self) -> None:
        """Forget the sums, and close the micro-batch."""
        self._sums.clear()
        self._self_check.forget()
        self.receiver.open(None)
        self._recorder.restore()
        self._watch.close()
        if self._shards is not None:
            self._shards.forget()

    def open(self, records: int, averaged: bool | None, by_function: bool = False) -> None:
        """Begin a micro-batch of so many records. An `averaged` loss is a mean over them, not a sum; with None only
        `backward`, from one loss for each record, is possible. Only a loss that is computed `by_function`, from batch to
        losses, may call parts of the model instead of the model."""
        self.refuse_missed()
        due = self._self_check.due(records)
        scale = float(records) if averaged else 1.0
        self.receiver.open(MicroBatch(records, averaged, scale, due, by_function=by_function))
        self._recorder.restore()
        if self._watch.is_open:
            self._watch.counters.rewind()
        else:
            self._watch.open(closely=due or not self._self_check.active)

    def run(self, function: LossFunction, batch: Any, drawn: DrawnPart | None) -> None:
        """Compute the losses of the open micro-batch by a function of the model and the batch, and run their backward pass.
        In a checked pass the whole function is checked later, by `refuse_unsound`. A micro-batch without records adds
        nothing, so the function is not called on it, unless other processes of a sharded model wait for that."""
        micro = self.receiver.micro
        if micro is None:
            raise no_batch()
        if micro.done and micro.records:
            raise taken_again()
        if not micro.records and self._shards is None:
            return
        messages.refuse_nested_batch(batch)
        micro.by_function = True
        self._self_check.begin_function(function, self._model, batch, micro, drawn)
        given, before = Given(batch), torch.get_rng_state()
        losses = function(self._model, given.batch)
        self._refuse_losses(losses, "record_losses")
        graph, repeatable = _graph(losses, micro), self._shards is None and given.unchanged()
        if self._self_check.is_new_path(graph, micro, repeatable):
            torch.set_rng_state(before)  # begin again, and check
            micro = MicroBatch(micro.records, None, due=True, by_function=True)
            self.receiver.open(micro)
            self._recorder.restore()
            self._self_check.begin_function(function, self._model, batch, micro, drawn)
            given = Given(batch)
            losses = function(self._model, given.batch)
            self._refuse_losses(losses, "record_losses")
            graph = _graph(losses, micro)
            self._self_check.is_new_path(graph, micro, repeatable)
        if micro.whole is not None:
            micro.whole.returned(losses)
        with torch.autocast(self._device, enabled=False):
            self._backward(micro, losses, graph, function, given.tensors)

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass from one loss for each record of the open micro-batch."""
        micro = self._refuse_losses(losses, "backward()")
        self._backward(micro, losses, _graph(losses, micro), None, ())

    def _refuse_losses(self, losses: Tensor, called: str) -> MicroBatch:
        """The open micro-batch; raises unless these are its losses."""
        micro = self.receiver.micro
        if (
            micro is None
            or losses.__class__ is not Tensor
            or losses.shape != (micro.records,)
            or not losses.requires_grad
        ):
            refuse_losses(losses, micro, called)
        assert micro is not None
        return micro

    def _backward(
        self,
        micro: MicroBatch,
        losses: Tensor,
        graph: LossGraph | None,
        function: LossFunction | None,
        given: Sequence[object],
    ) -> None:
        micro.averaged, micro.scale = False, 1.0
        if graph is not None:
            given = rows_among(graph.leaves, micro.records) if function is None else given
            known = {*map(id, micro.anchors), *map(id, given), *self._reachable}
            refuse_foreign_leaves(graph.leaves, known, micro.check is not None, function)
            if micro.check is not None and micro.check.forward_passes:
                micro.check.seed_losses(losses, once=micro.whole is not None)
                if micro.whole is not None:
                    totals: dict[str, Tensor] = {}
                    micro.whole.totals = totals
                    micro.whole.judged = micro.check.add_up(losses, micro.whole.judged, totals)
        losses.backward(torch.ones_like(losses))

    def refuse_missed(self) -> None:
        """Raise if the open micro-batch of a sharded model did not go through forward and backward: the other processes are
        waiting in them, and fail when this one ends."""
        micro = self.receiver.micro
        if self._shards is not None and micro is not None and not micro.done:
            raise Misuse(
                "a part of the batch did not go through the model and backward(): the other ranks of a sharded model wait "
                "for that. Run every part that private.loader hands out, empty ones as well, on every rank. If you did, the "
                "losses do not depend on the model's output."
            )

    def refuse_unsound(self) -> int:
        """Raise if the batch has written into the model, or if a check finds a lost gradient or outputs that depend on other
        records. Returns how many passes were checked. All processes of a sharded model must call it together."""
        self._watch.refuse_step()
        if self._shards is not None:
            self._shards.gather_again()
        live = self.parameters if self._shards is None else self._map.live
        checked = self._self_check.compare(self.parameters, live)
        self._watch.counters.count()
        return checked

    def silenced(self) -> AbstractContextManager[None]:
        """Inside, the model runs as if it were not private."""
        return self._hooks.silenced()

    def complete(self) -> dict[str, Tensor]:
        """The clipped sum of every parameter, in memory that the engine uses again for the next batch. For a sharded model:
        this process's part of the sum over all processes."""
        return self._sums.complete()


def _graph(losses: object, micro: MicroBatch | None) -> LossGraph | None:
    """The graph behind the losses of a micro-batch that has records: in a checked pass all of it. None if there is none."""
    if micro is None or not micro.records or not isinstance(losses, Tensor) or not losses.requires_grad:
        return None
    return LossGraph(losses, STOPS, everywhere=micro.check is not None)


def no_batch() -> Misuse:
    """The error for a function that is to be called on a batch while none is open."""
    return Misuse(
        "private.step() was called without a batch: iterate over private.loader, and give it each batch once."
    )


def taken_again() -> Misuse:
    """The error for a function that is to be called on a micro-batch whose gradients were added up already."""
    return Misuse(
        "private.step() was called again on a batch that was refused or interrupted after its gradients had been added up. "
        "private.loader.again() yields the batch once more: give that to private.step()."
    )


def refuse_losses(losses: object, micro: MicroBatch | None, called: str = "backward()") -> None:
    """Refuse anything but one loss for each record of the open micro-batch. `called` is what takes or returns them."""
    takes = "takes" if called == "backward()" else "must return"
    if micro is None:
        raise Misuse("backward() without a batch: take one from private.loader, run the model on it, then backward().")
    if not isinstance(losses, Tensor):
        raise InvalidType(f"{called} {takes} a tensor of one loss per record, got {type(losses).__name__}.")
    if losses.shape != (micro.records,):
        # How many losses there are may tell how many records there are, which is not public.
        sizes = [
            ("B" if size == micro.records else "n") if k == 0 else str(size) for k, size in enumerate(losses.shape)
        ]
        raise InvalidArgument(
            f"{called} {takes} one loss per record, a tensor of shape (B,), got ({', '.join(sizes)}): use "
            "reduction='none', and average over each record's own tokens or outputs."
        )
    if not losses.requires_grad and micro.records:
        raise Misuse(
            "the losses have no gradient: compute them from the model's output, without no_grad() or detach()."
        )
