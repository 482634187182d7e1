"""Lightning's loop for one batch, with forward and backward pass by `private.accumulate`: `training_step` is the function
from batch to losses, which is checked as a whole."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from clipless.errors import Misuse
from clipless.integrations.lightning.batches import PoissonBatches
from clipless.integrations.lightning.losses import RecordLosses
from clipless.integrations.lightning.metrics import Withheld
from clipless.private import Private


class PrivateOptimization(_AutomaticOptimization):
    """Takes the place of Lightning's own, whose progress it continues, where `training_step` returns one loss per record."""

    def __init__(self, trainer: Trainer, private: Private, batches: PoissonBatches, metrics: Withheld) -> None:
        super().__init__(trainer)
        self.optim_progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        self._private, self._batches, self._metrics = private, batches, metrics

    def _make_closure(self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, batch_idx: int) -> Closure:
        _, *rest = kwargs.values()
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        return Closure(partial(self._forward_and_backward, rest, zero_grad))

    def _forward_and_backward(self, rest: list[Any], zero_grad: Callable[[], None] | None) -> ClosureResult:
        """Both passes of a micro-batch, and Lightning's hooks around the backward pass. Without records there is none."""
        module = self.trainer.lightning_module
        step = _TrainingStep(self.trainer, rest, zero_grad, self._metrics)
        self._private.accumulate(step.function(), self._batches.newest)
        if step.result is not None:
            self.trainer.precision_plugin.post_backward(step.result.loss, module)
            return step.result
        if zero_grad is not None:
            zero_grad()
        return ClosureResult(next(module.parameters()).new_zeros(()))


class _TrainingStep:
    """`training_step` as a function of the module and a batch as it was collated. `result` is what it returned first."""

    def __init__(
        self, trainer: Trainer, rest: list[Any], zero_grad: Callable[[], None] | None, metrics: Withheld
    ) -> None:
        self._trainer, self._rest, self._zero_grad, self._metrics = trainer, rest, zero_grad, metrics
        self.result: ClosureResult | None = None

    def function(self) -> Callable[[Any, Any], Tensor]:
        """The function, which goes by the name and the place of `training_step` in messages."""

        @wraps(self._trainer.lightning_module.training_step)
        def record_losses(model: Any, batch: Any) -> Tensor:
            if self.result is not None:  # a check repeats it: what it logs was logged
                with self._metrics.silenced():
                    return _losses(self._output(batch))
            output = self._output(batch)
            losses = _losses(output)
            self.result = ClosureResult.from_training_step_output(output, 1)
            if self._zero_grad is not None:
                self._zero_grad()
            self._trainer.precision_plugin.pre_backward(losses, self._trainer.lightning_module)
            return losses

        return record_losses

    def _output(self, batch: Any) -> Any:
        """What the Trainer does with a batch, from its transfer to the device on."""
        batch = self._trainer.precision_plugin.convert_input(batch)
        batch = self._trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(self._trainer, "batch_to_device", batch, dataloader_idx=0)
        return call._call_strategy_hook(self._trainer, "training_step", batch, *self._rest)


def _losses(output: Any) -> Tensor:
    losses = output.get("loss") if isinstance(output, Mapping) else output
    if losses is None:
        raise Misuse(
            "training_step returned no loss, so that the batch would be stepped without its backward pass, and none may be "
            "dropped: return one loss per record for every batch."
        )
    if not isinstance(losses, Tensor) or not losses.dim():
        raise Misuse(
            "training_step returned one number: return one loss per record, a tensor of shape (B,), with reduction='none' "
            "and means over each record's own outputs. If it must be the mean, call the module itself in training_step, "
            "self(x), and give PrivateTraining(..., loss_reduction='mean')."
        )
    return losses


def refuse_own_backward(module: LightningModule) -> None:
    """Raise for a module with a backward pass of its own, which would not be called."""
    if is_overridden("backward", module, LightningModule) and type(module).backward is not RecordLosses.backward:
        raise Misuse(
            f"{type(module).__name__} has its own backward(), which is not called where training_step returns one loss per "
            "record: leave it out, or return the mean, call the module itself in training_step, self(x), and give "
            "PrivateTraining(..., loss_reduction='mean')."
        )
