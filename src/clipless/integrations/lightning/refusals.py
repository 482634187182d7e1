"""What private training refuses of a Trainer, its strategy and its callbacks."""

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from clipless.errors import Misuse
from clipless.private import Private

_CLIPPING = "each record's gradient is clipped: leave it out, and choose the bound by Privacy(clipping=...)."


def refuse_trainer(trainer: Trainer) -> None:
    """Raise for settings that break the promise."""
    if trainer.gradient_clip_val:
        raise Misuse(f"gradient_clip_val={trainer.gradient_clip_val} would clip the mean, and {_CLIPPING}")
    plugin = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        raise Misuse(
            f"precision={plugin.precision!r} scales losses, and noise would not be scaled with them: use "
            "precision='bf16-mixed', which needs no scaler, or '32-true'."
        )
    if trainer.overfit_batches:
        raise Misuse(
            f"overfit_batches={trainer.overfit_batches} trains on the same records in every step, which is not the sampling "
            "that is accounted for: leave it out, or give a smaller data set."
        )
    if trainer._detect_anomaly:
        raise Misuse(
            "detect_anomaly=True ends training when one record's gradient is not a number, so that everyone sees it; a "
            "private step leaves such a record out. Look for it without PrivateTraining, on records that are public."
        )


def refuse_rounded_means(plugin: Precision) -> None:
    """Raise for 16 bits, where a mean over the batch is refused: its division by the number of records is rounded."""
    if "16" in plugin.precision:
        raise Misuse(
            f"precision={plugin.precision!r} rounds the division by the number of records, so that adding a record changes "
            "the contribution of every other. Leave loss_reduction out and return one loss per record, or return their sum "
            "with loss_reduction='sum'."
        )


def refuse_module(module: LightningModule) -> None:
    """Raise for a module that steps or clips by itself."""
    if not module.automatic_optimization:
        raise Misuse(
            "the module has automatic_optimization=False, and PrivateTraining needs the Trainer's own steps: set it to "
            "True, or call clipless.make_private in a loop of your own."
        )
    if is_overridden("configure_gradient_clipping", module, LightningModule):
        raise Misuse(f"configure_gradient_clipping finds no gradient before the step, and {_CLIPPING}")
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise Misuse("training_step(dataloader_iter) fetches batches itself: use training_step(batch, batch_idx).")


def refuse_callbacks(callbacks: Sequence[Callback], module: LightningModule) -> None:
    """Raise for callbacks that use records outside the budget or change the batch within a run."""
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging) and callback.pl_module_contains_batch_norm(module):
            raise Misuse(
                "StochasticWeightAveraging measures the statistics of BatchNorm on the records in a further epoch, without "
                "noise: replace BatchNorm with GroupNorm (clipless.replace_batchnorm(model)), or use EMAWeightAveraging."
            )
        if isinstance(callback, (LearningRateFinder, BatchSizeFinder)):
            raise Misuse(
                f"{type(callback).__name__} trains on the records before the run, which nothing accounts for: find the "
                "setting on public data, or with `clipless tune`, which pays for the search."
            )
        if isinstance(callback, GradientAccumulationScheduler):
            raise Misuse(
                "GradientAccumulationScheduler changes the batch size within the run: give "
                "Trainer(accumulate_grad_batches=k), which splits each batch into k parts."
            )
        if isinstance(callback, (ThroughputMonitor, DeviceStatsMonitor)):
            raise Misuse(
                f"{type(callback).__name__} logs the number of records drawn, or the memory that they take, which are not "
                "private: leave it out, and measure without PrivateTraining, on records that are public."
            )
        if isinstance(callback, SpikeDetection):
            raise Misuse(
                "SpikeDetection ends training by the loss of a batch, which is computed without noise: leave it out, as "
                "clipping bounds what a batch does to the weights; or use EarlyStopping on a validation metric."
            )


def refuse_times(callbacks: Sequence[Callback], parts: int) -> None:
    """Raise for what happens by the clock, where batches have parts: it would fall between two of them."""
    if parts == 1:
        return
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            raise Misuse(
                f"train_time_interval would save in the middle of a batch of accumulate_grad_batches={parts} parts, from "
                "where no run can be resumed: use ModelCheckpoint(every_n_train_steps=...)."
            )
        if isinstance(callback, Timer) and callback._interval == "step":
            raise Misuse(
                f"max_time would stop in the middle of a batch of accumulate_grad_batches={parts} parts: leave it out, and "
                "use max_steps, or callbacks=[Timer(..., interval='epoch')]."
            )


def refuse_validation_within_a_batch(trainer: Trainer) -> None:
    """Raise if validations, and the checkpoints after them, would fall between two parts of a batch."""
    parts, every = trainer.accumulate_grad_batches, trainer.val_check_batch
    if not trainer.enable_validation or parts == 1 or every == float("inf"):
        return
    if every is None or every % parts:
        raise Misuse(
            f"val_check_interval={trainer.val_check_interval} validates in the middle of a batch of {parts} parts: give a "
            f"number of batches that is a multiple of accumulate_grad_batches={parts}."
        )


def refuse_dropped_batch(private: Private) -> None:
    """Raise at the end of an epoch whose last batch was not stepped."""
    try:
        private.refuse_unstepped()
    except Misuse as error:
        raise Misuse(
            "the epoch ended with a batch that was drawn and not stepped, and none may be dropped: a choice of batches by "
            "what is in them is not what the ledger counts. Return nothing from on_train_batch_start, call "
            "optimizer.step(closure=optimizer_closure) in every optimizer_step, and set trainer.should_stop after the last "
            "part of a batch."
        ) from error


def refuse_strategy(strategy: Strategy) -> None:
    """Raise for any strategy but one process, or DDP without hooks of its own."""
    if type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise Misuse(
            f"{type(strategy).__name__} is not supported: use Trainer(strategy='ddp') or one device. Sharded models train "
            "by clipless.make_private in a loop of your own (docs/distributed.md)."
        )
    if isinstance(strategy, DDPStrategy) and (strategy._ddp_comm_hook or strategy._model_averaging_period):
        raise Misuse(
            "a communication hook or model averaging of DDPStrategy would act on gradients, which are added up by the "
            "private run itself: leave ddp_comm_hook and model_averaging_period out."
        )
