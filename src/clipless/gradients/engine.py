"""The engine: a façade over hooks, receiver, checks and sums."""

import torch
from torch import Tensor, nn

from clipless.errors import InvalidArgument, InvalidType, Misuse
from clipless.gradients.capture.hooks import Hooks
from clipless.gradients.capture.micro_batch import MicroBatch
from clipless.gradients.capture.model_map import ModelMap
from clipless.gradients.capture.receiver import Receiver
from clipless.gradients.capture.recorder import Recorder
from clipless.gradients.capture.watch import StateWatch
from clipless.gradients.checks.self_check import SelfCheck
from clipless.gradients.forms import forget
from clipless.gradients.kernels import Kernels
from clipless.gradients.records import written
from clipless.gradients.shards import Shards, refuse_sharded
from clipless.gradients.sums import ClippedSums, Factors, Observe
from clipless.partition import Partition


class Engine:
    """Turns backward passes of an ordinary model into clipped sums over the expected batch.

    After `attach()`, for each logical batch: `clear()`; for each of its micro-batches `open(...)`, then the user's
    forward and backward pass; `refuse_unsound()`; `complete()`. `detach()` takes everything off the model. Sums are
    divided by the expected batch, and are those of each record's own loss, whether the loss was a sum or a mean. If it
    `checks_itself`, passes are checked now and then, and whenever they go through something new.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Partition,
        factors: Factors,
        observe: Observe | None,
        kernels: Kernels,
        expected_batch: float = 1.0,
        checks_itself: bool = False,
        receiver: type[Receiver] = Receiver,
        shards: Shards | None = None,
    ) -> None:
        if shards is None:
            refuse_sharded(model)
        layers, self._shards = ModelMap(model, sharded=shards is not None), shards
        self._map = layers
        self.parameters, self.modules = layers.parameters, layers.modules
        self._hooks = Hooks(layers, None if shards is None else shards.root)
        self._sums = ClippedSums(layers, groups, factors, observe, kernels, expected_batch, shards)
        self.receiver = receiver(self._hooks, self.modules, self.parameters, self._sums)
        self._self_check = SelfCheck(self.modules, self.receiver.run, self.receiver.output, self._hooks.silenced)
        self._self_check.active = checks_itself
        self._watch = StateWatch(model)
        self._recorder = Recorder(model, layers, self._hooks, self.receiver, self._self_check, self._watch, shards)
        self._recorder.looks_at_data = len(groups) > 1

    def attach(self) -> None:
        """Put hooks on the model, or raise and leave it as it was."""
        self._hooks.attach()
        self._recorder.attach()
        self._hooks.listener = self._recorder

    def detach(self) -> None:
        """Take all hooks off the model, and give back the memory that was kept for further steps."""
        self._recorder.restore()
        if self._shards is not None:
            self._shards.forget()
        self._hooks.detach()
        self._hooks.listener = None
        forget()

    def intact(self) -> bool:
        """Whether every hook is where `attach` put it, after anything that an interrupted pass left is put back."""
        self._recorder.restore()
        return self._hooks.intact()

    @property
    def seen(self) -> int:
        """How many records of the logical batch went through backward."""
        return self._sums.seen

    def clear(self) -> None:
        """Forget the sums: no micro-batch is open until the next logical batch begins."""
        self._sums.clear()
        self._self_check.forget()
        self.receiver.open(None)
        self._recorder.restore()
        self._watch.close()
        if self._shards is not None:
            self._shards.forget()

    def open(self, records: int, averaged: bool) -> None:
        """The next forward and backward pass is on so many records, by whose number an `averaged` loss divides."""
        self.refuse_missed()
        due = self._self_check.due(records)
        self.receiver.open(MicroBatch(records, averaged, float(records) if averaged else 1.0, due))
        self._recorder.restore()
        if not self._watch.is_open:
            self._watch.open(closely=due or not self._self_check.active)

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass from one loss for each record of the open micro-batch."""
        micro = self.receiver.micro
        if (
            micro is None
            or losses.__class__ is not Tensor
            or losses.shape != (micro.records,)
            or not losses.requires_grad
        ):
            _refuse_losses(losses, micro)
        if micro is not None and micro.records and losses.requires_grad:
            micro.averaged, micro.scale = False, 1.0
            if micro.check is not None:
                micro.check.seed_losses(losses)
        losses.backward(torch.ones_like(losses))

    def refuse_missed(self) -> None:
        """Raise if the open micro-batch of a sharded model did not go through forward and backward. The other processes wait
        for that, and hear of it when this one ends."""
        micro = self.receiver.micro
        if self._shards is not None and micro is not None and not micro.done:
            raise Misuse(
                "a part of the batch did not go through the model and backward(): the other ranks of a sharded model wait "
                "for that. Run every part that private.loader hands out, empty ones as well, on every rank. If you did, the "
                "losses do not depend on the model's output."
            )

    def refuse_unsound(self) -> int:
        """Raise if the batch has written into the model, or if a check finds a gradient lost or outputs that depend on other
        records. Returns how many passes were checked. Processes of a sharded model call it together."""
        self._watch.refuse_step()
        if self._shards is None:
            return self._self_check.compare(self.parameters, self.parameters)
        self._shards.gather_again()
        return self._self_check.compare(self.parameters, self._map.live)

    def complete(self) -> dict[str, Tensor]:
        """The clipped sum of every parameter over the expected batch, in memory of the engine's own: this process's part of
        it, over all processes, where the model is sharded."""
        return self._sums.complete()


def _refuse_losses(losses: object, micro: MicroBatch | None) -> None:
    """Refuse anything but one loss for each record of the open micro-batch."""
    if micro is None:
        raise Misuse("backward() without a batch: take one from private.loader, run the model on it, then backward().")
    if not isinstance(losses, Tensor):
        raise InvalidType(f"backward() takes a tensor of one loss per record, got {type(losses).__name__}.")
    if losses.shape != (micro.records,):
        shape = written(losses.shape, micro.records)
        raise InvalidArgument(
            f"backward() takes one loss per record, a tensor of shape (B,), got {shape}: use reduction='none', and average "
            "over each record's own tokens or outputs."
        )
    if not losses.requires_grad and micro.records:
        raise Misuse(
            "the losses have no gradient: compute them from the model's output, without no_grad() or detach()."
        )
