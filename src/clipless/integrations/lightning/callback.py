"""PrivateTraining: the callback that makes `Trainer.fit` one private run.

The run is made when model, optimizer and processes are ready (`on_fit_start`). From then on Lightning's own loop trains it:
batches come from `private.loader`, and the optimizer's step releases noised gradients only.
"""

import secrets
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from clipless.accounting import Spent
from clipless.errors import InvalidType, Misuse
from clipless.gradients import Kernels
from clipless.integrations.lightning.batches import PoissonBatches, one_loader
from clipless.integrations.lightning.length import RunLength, run_length
from clipless.integrations.lightning.metrics import Withheld
from clipless.integrations.lightning.optimization import PrivateOptimization, refuse_own_backward
from clipless.integrations.lightning.refusals import (
    refuse_callbacks,
    refuse_dropped_batch,
    refuse_module,
    refuse_rounded_means,
    refuse_strategy,
    refuse_times,
    refuse_trainer,
    refuse_validation_within_a_batch,
)
from clipless.privacy import Privacy
from clipless.private import Private, make_private
from clipless.random_state import RandomState, random_state_of, set_random_state


class PrivateTraining(Callback):
    """Makes one `Trainer.fit` differentially private, for modules with automatic optimization.

    The training DataLoader's records, batch size, workers and collate function are taken over; its batches are drawn by
    Poisson sampling. The budget covers all epochs, or steps, that the Trainer is set to. `accumulate_grad_batches=k` makes
    the expected batch k times as large and splits it into k parts. `private` is the run, from `on_fit_start` on; it is
    detached when `fit` ends.

    Checkpoints hold the run's state; `fit(ckpt_path=...)` resumes it. They need a ledger on disk, at `ledger`, or in the
    folder "ledgers" of the Trainer's `default_root_dir`. `reseed` resumes with new noise, and leaves steps that were lost
    counted. What is logged while training is computed from records without noise, and is withheld; `log_not_private=True`
    logs it.

    `training_step` returns one loss per record, (B,), and is checked as a whole. With `loss_reduction="mean"` or `"sum"` it
    returns one number, which is that of the records' losses; it must then call the module itself, `self(x)`.
    """

    def __init__(
        self,
        privacy: Privacy,
        *,
        ledger: str | Path | None = None,
        reseed: bool = False,
        log_not_private: bool = False,
        loss_reduction: str | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        if not isinstance(privacy, Privacy):
            raise InvalidType(f"PrivateTraining takes a clipless.Privacy(epsilon=...), got {type(privacy).__name__}.")
        self.privacy = privacy
        self.private: Private | None = None
        self._ledger, self._reseed, self._log_not_private = ledger, reseed, log_not_private
        self._loss_reduction, self._kernels = loss_reduction, kernels
        self._batches: PoissonBatches | None = None
        self._saved: dict[str, Any] | None = None
        self._kept: RandomState | None = None
        self._ended = False
        self._metrics = Withheld(log_not_private)

    def spent(self) -> Spent:
        """The privacy spent so far."""
        return self._run.spent()

    @property
    def _run(self) -> Private:
        if self.private is None:
            raise Misuse("PrivateTraining has no run yet: it begins with trainer.fit().")
        return self.private

    # Before training.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what would break the promise, and put Poisson batches where the Trainer looks for its training data."""
        if stage != "fit":
            return
        if self.private is not None:
            raise Misuse(
                "this PrivateTraining has trained already, and a second fit() would spend a second budget on the same "
                "records. To continue an interrupted run, make a new Trainer with a new PrivateTraining and call "
                "fit(ckpt_path=...); for a new run on other records do the same without ckpt_path."
            )
        refuse_trainer(trainer)
        refuse_callbacks(trainer.callbacks, pl_module)
        refuse_times(trainer.callbacks, trainer.accumulate_grad_batches)
        refuse_module(pl_module)
        if self._loss_reduction == "mean":
            refuse_rounded_means(trainer.precision_plugin)
        if self._loss_reduction is None:
            refuse_own_backward(pl_module)
        self._saved = None
        source = trainer.fit_loop._data_source
        find, parts = _source(source), trainer.accumulate_grad_batches
        self._batches = PoissonBatches(
            find, parts, lambda loader: run_length(trainer, loader, parts, self.privacy.neighbours)
        )
        source.instance = self._batches
        self._metrics = trainer.fit_loop.epoch_loop._results = Withheld(self._log_not_private)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of a run that was not private."""
        if trainer.state.fn == "fit" and self.state_key not in checkpoint["callbacks"]:
            refuse_plain_checkpoint()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of the run to resume until the run is made."""
        self._saved = state_dict

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the run, or resume it."""
        if self._batches is None:
            raise Misuse("PrivateTraining was added after the Trainer had begun: give it to Trainer(callbacks=[...]).")
        refuse_strategy(trainer.strategy)
        if trainer.ckpt_path is not None and self._saved is None:
            refuse_plain_checkpoint()
        loader, length = self._batches.source, self._batches.length
        self.private = self._batches.private = self._made(trainer, loader, length)
        if self._loss_reduction is None:
            epoch_loop = trainer.fit_loop.epoch_loop
            epoch_loop.automatic_optimization = PrivateOptimization(trainer, self.private, self._batches, self._metrics)
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            trainer.strategy.model = pl_module  # the run adds up over the ranks itself, after clipping
        if self._saved is not None:
            self._batches.random = self.private.resume(self._saved, ledger=self._ledger, reseed=self._reseed)
            self._saved = None
        elif self._ledger is not None or trainer.checkpoint_callbacks:
            self.private.save_to(self._new_ledger(trainer))

    def _made(self, trainer: Trainer, loader: DataLoader[Any], length: RunLength) -> Private:
        (optimizer,) = trainer.strategy.optimizers
        model = trainer.strategy.model
        assert model is not None
        return make_private(
            model, optimizer, length.rebatched(loader), **self.privacy.arguments(), epochs=length.epochs,
            steps=length.steps, loss_reduction=self._loss_reduction, kernels=self._kernels,
        )  # fmt: skip

    def _new_ledger(self, trainer: Trainer) -> Path:
        name: str = trainer.strategy.broadcast(f"{secrets.token_hex(4)}.jsonl")
        path = Path(trainer.default_root_dir, "ledgers", name) if self._ledger is None else Path(self._ledger)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    # While training.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse validations that would fall between two parts of a batch, now that the length of an epoch is known."""
        refuse_validation_within_a_batch(trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Undo the division of a part's loss by the number of parts: clipping is about each record's own loss."""
        if self._loss_reduction is None:
            return
        if loss.dim():
            raise Misuse(
                f"training_step returned more than one number, and not the {self._loss_reduction} that loss_reduction says: "
                "leave loss_reduction out, and return one loss per record."
            )
        if trainer.accumulate_grad_batches > 1 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * trainer.accumulate_grad_batches)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """A validation may follow. A resumed run may leave it out, so it must not change the random numbers of training."""
        if trainer.fit_loop._should_accumulate():
            nothing_to_save(trainer)
        if trainer.enable_validation:
            self._kept = random_state_of([pl_module.device], ())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue with the random numbers that training would have had without the validation."""
        if self._kept is not None:
            set_random_state(self._kept, ())
            self._kept = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse an epoch that dropped its last batch; then log epsilon, which is public."""
        refuse_dropped_batch(self._run)
        if not trainer.barebones:
            with self._metrics.public():
                pl_module.log("epsilon", self.spent().epsilon, prog_bar=True, sync_dist=True)

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, for the Trainer's checkpoint. It holds the key of all later noise: keep it as secret as the
        data. A run that has ended has none: what is saved then are weights, from which no run can be resumed."""
        return {} if self.private is None or self._ended else self.private.resumable_state()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The run is over: it can be resumed from a checkpoint."""
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """After fit() the module is an ordinary one, the keys of the noise are erased, and the ledger is released."""
        if stage == "fit":
            self._end()

    def _end(self) -> None:
        self._ended, self._kept = True, None
        if self.private is not None:
            self.private.detach()


def _source(source: Any) -> Any:
    """A function that asks the module, the data module or the arguments of `fit` for the training loader, once the Trainer
    looks elsewhere."""
    given = type(source)(source.instance, source.name)
    return lambda: one_loader(given.dataloader())


def nothing_to_save(trainer: Trainer) -> None:
    """Between two parts of a batch the weights are those of the last step. ModelCheckpoint knows that it has saved them,
    except in a run that was resumed from them."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._last_global_step_saved = trainer.global_step


def refuse_plain_checkpoint() -> NoReturn:
    raise Misuse(
        "the checkpoint holds no private run, so what its steps have spent is unknown. If they saw none of these records, "
        "load the weights alone, LightningModule.load_from_checkpoint(path), and call fit() without ckpt_path."
    )
