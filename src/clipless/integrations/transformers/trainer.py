"""PrivateTrainer: a `transformers.Trainer` whose training is one private run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from clipless.errors import CliplessError, InvalidArgument, InvalidType, MissingLibrary, Misuse
from clipless.gradients import Kernels
from clipless.integrations.transformers.losses import decoder_inputs, record_losses, split_labels
from clipless.integrations.transformers.noted import LossFunctionOfParts, NotedLosses
from clipless.integrations.transformers.own_loss import shift_of_loss
from clipless.integrations.transformers.settings import refuse_settings, warn_of_training_records
from clipless.integrations.transformers.turns import Turn, Turns, loader_of
from clipless.neighbours import pass_length
from clipless.privacy import Privacy
from clipless.private import Private, make_private
from clipless.runs.ledger_file import read_ledger
from clipless.sampling.fetching import source_of

LEDGER, CHECKPOINT = "ledger.jsonl", "clipless.checkpoint"
# Overridden below. In a Trainer that does without one of them, what it is overridden for would not happen.
_RELIED_ON = (
    "create_accelerator_and_postprocess",
    "_prepare_for_training",
    "training_step",
    "_get_num_items_in_batch",
    "floating_point_ops",
    "_track_num_input_tokens",
    "_clip_grad_norm",
    "_get_grad_norm",
    "log",
    "_save_optimizer_and_scheduler",
    "_finalize_training",
)
_NOT_PRIVATE = {"loss": "loss_not_private", "train_loss": "train_loss_not_private"}


class PrivateTrainer(Trainer):
    """A Trainer with `privacy=clipless.Privacy(...)`: what `train()` does to the weights is differentially private.

    The expected batch is per_device_train_batch_size × gradient_accumulation_steps × processes; every step takes a Poisson
    sample of that expected size, in micro-batches of at most per_device_train_batch_size records. Each record's loss is its
    own: tokens are averaged within a record. Settings that break the promise are refused when the trainer is made.

    `private` is the run, from the beginning of `train()`: its plan, ledger and `spent()`. The ledger is written to
    `ledger.jsonl` in the output folder. Checkpoints hold the keys of the noise until the run has ended: keep them secret.

    The training loss is not private, so it is neither logged nor returned, unless `log_not_private_loss` asks for it.
    `kernels=clipless.Kernels(memory_cap=...)` bounds the memory.

    With another Trainer: `class Mine(PrivateTrainer, Seq2SeqTrainer): pass`.
    """

    # Evaluation uses it, training does not, unless a subclass has its own.
    _evaluation_loss: ClassVar[Callable[..., Any]] = Trainer.compute_loss

    def __init__(
        self,
        *args: Any,
        privacy: Privacy,
        kernels: Kernels | None = None,
        log_not_private_loss: bool = False,
        **more: Any,  # the arguments of the Trainer, which differ from one to the other
    ) -> None:
        if not isinstance(privacy, Privacy):
            raise InvalidType(f"privacy must be a clipless.Privacy(epsilon=..., ...), got {type(privacy).__name__}.")
        self.privacy, self.kernels, self.log_not_private_loss = privacy, kernels, log_not_private_loss
        self.private: Private | None = None
        self._turns: Turns | None = None
        self._records: DataLoader[Any] | None = None
        self._shifted: bool | None = None
        super().__init__(*args, **more)
        warn_of_training_records(self.eval_dataset, self.train_dataset)

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse settings that break the promise, before anything is built from them."""
        refuse_settings(self.args)
        _refuse_overridden(type(self))
        super().create_accelerator_and_postprocess()

    def hyperparameter_search(self, *args: Any, **more: Any) -> NoReturn:
        """Refused: every trial costs privacy."""
        raise Misuse(
            "hyperparameter_search trains on the same records many times, and reports one epsilon: choose settings on other "
            "data, or search with `clipless tune`, which accounts for the search."
        )

    # Data.

    def get_train_dataloader(self) -> "DataLoader[Turn]":
        """The turns of an epoch: shares of Poisson batches, in micro-batches. Settings may have changed since the trainer
        was made, so they are looked at once more."""
        refuse_settings(self.args, neftune_noise_alpha=self.neftune_noise_alpha)
        if self.train_dataset is None:
            raise InvalidArgument("training requires a train_dataset: give one to PrivateTrainer.")
        self._records = self._record_loader(self.get_total_train_batch_size(self.args))
        data, batch, _ = source_of(self._records)
        steps = pass_length(self.privacy.neighbours, len(data), batch, self.args.max_steps)  # type: ignore[arg-type]
        self._turns = Turns(steps, self.args.gradient_accumulation_steps, self._train_batch_size)
        return loader_of(self._turns)

    def _record_loader(self, batch: int) -> "DataLoader[Any]":
        """The records as the Trainer would load them: columns, collator, workers."""
        data, collate, args = self.train_dataset, self.data_collator, self.args
        if type(data).__module__.partition(".")[0] == "datasets":
            data = self._remove_unused_columns(data, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        return DataLoader(
            data,
            batch_size=batch,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def num_examples(self, dataloader: Any) -> int:
        """The number of records; in training, where it is secret, the one that the expected batch and the rate suggest."""
        if not isinstance(dataloader.dataset, Turns):
            return super().num_examples(dataloader)
        rate = self.privacy.sample_rate
        return len(self.train_dataset) if rate is None else round(self.get_total_train_batch_size(self.args) / rate)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """None in training: no loss is divided by a number that depends on other records."""
        if batch_samples and isinstance(batch_samples[0], Turn):
            return None
        return super()._get_num_items_in_batch(batch_samples, device)

    def floating_point_ops(self, inputs: Any) -> int:
        """Zero in training: the number of tokens drawn is not private."""
        return 0 if isinstance(inputs, Turn) else super().floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Nothing: the number of tokens drawn is not private."""

    # The run.

    def train(self, *args: Any, **more: Any) -> Any:
        """As the Trainer does. If a check refuses the first step, nothing was released, and nothing is left of the run."""
        try:
            return super().train(*args, **more)
        except CliplessError:
            self._forget_unbegun()
            raise

    def _forget_unbegun(self) -> None:
        """Remove the hooks and the ledger of a run that has taken no step."""
        ledger = Path(self.args.output_dir) / LEDGER
        if self.private is None or self.private.ledger.steps:
            return
        self.private.detach()
        if self.is_world_process_zero() and ledger.is_file() and not read_ledger(ledger).ledger().steps:
            ledger.unlink()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Model, optimizer and scheduler as the Trainer prepares them; then the private run around them."""
        if self.private is not None:
            raise Misuse(
                "train() was called already: a second call is a second run on the same records, whose epsilon adds up. Plan "
                "all epochs in one call; after an interruption resume with a new PrivateTrainer and resume_from_checkpoint."
            )
        assert self._turns is not None
        assert self._records is not None
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, None)
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # the one that Accelerate wraps
        if self._losses_of_the_model:
            self._shifted = shift_of_loss(self.model, self._records, self._prepare_inputs)
        per_epoch = len(self._turns) // self.args.gradient_accumulation_steps
        whole = self.args.max_steps <= 0 and max_steps % per_epoch == 0
        private = make_private(
            model,
            optimizer,
            self._records,
            **self.privacy.arguments(),
            epochs=max_steps // per_epoch if whole else None,
            steps=None if whole else max_steps,
            kernels=self.kernels,
        )
        self._turns.draw_from(private)
        self.private = private
        self._begin(private, resume_from_checkpoint)
        return model, loader

    def _begin(self, private: Private, checkpoint: str | None) -> None:
        """Open the ledger of a new run, or continue from a checkpoint."""
        if checkpoint is None:
            private.save_to(Path(self.args.output_dir) / LEDGER)
            return
        saved = Path(checkpoint) / CHECKPOINT
        if not saved.is_file():
            raise InvalidArgument(
                f"{checkpoint} has no {CHECKPOINT}: it was saved by another Trainer or with save_only_model=True, or its "
                "run has ended. Noise and ledger cannot be restored from it: start a new run."
            )
        self._load_optimizer_and_scheduler(checkpoint)
        private.load_checkpoint(saved)
        if private.steps_taken != self.state.global_step:
            private.detach()
            raise Misuse(
                f"{checkpoint} mixes files from different steps of the run: use another checkpoint, unchanged."
            )

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward passes of some micro-batches. Returns zero, or, if asked for, the sum of the losses over the
        expected batch."""
        assert self.private is not None
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        losses = NotedLosses(self._function, self._prepare_inputs)
        for part in inputs:
            # Accelerate turns autocast on inside the model's forward; a run that checks itself must see it from outside.
            with self.compute_loss_context_manager(), self.accelerator.autocast():
                self.private.accumulate(losses.of_next_part(), part)
        total = losses.total if self.log_not_private_loss else torch.zeros((), device=self.args.device)
        return total * self.args.world_size / self.private.plan.expected_batch

    def compute_record_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """One loss per record, (B,): the model's own loss for that record, or what `compute_loss_func` returns. A subclass
        may compute another."""
        base = self._base_model()
        given, labels = split_labels(inputs)
        outputs = model(**decoder_inputs(base, given, labels))
        if self.compute_loss_func is not None:
            return self.compute_loss_func(outputs, labels.get("labels"), num_items_in_batch=None)
        return record_losses(base, outputs, labels, self.args.label_smoothing_factor, self._shifted)

    @property
    def _losses_of_the_model(self) -> bool:
        """Whether the losses that are trained are to be the model's own."""
        return (
            self.compute_loss_func is None
            and not self._has_own_losses
            and type(self).compute_loss is type(self)._evaluation_loss
        )

    @property
    def _has_own_losses(self) -> bool:
        return type(self).compute_record_losses is not PrivateTrainer.compute_record_losses

    @property
    def _function(self) -> LossFunctionOfParts:
        """What computes the losses in training: a subclass' own `compute_loss`, if it has no `compute_record_losses`."""
        own_loss = type(self).compute_loss is not type(self)._evaluation_loss
        return self.compute_loss if own_loss and not self._has_own_losses else self.compute_record_losses

    def _base_model(self) -> nn.Module:
        """The model itself, where an adapter is around it."""
        get = getattr(self.model, "get_base_model", None)
        return get() if callable(get) else self.model

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Nothing: each record's gradient is clipped, and before the step there is none of the batch."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """None: before the step there is no gradient to show."""

    # What is shown and saved.

    def evaluate(self, eval_dataset: Any = None, *args: Any, **more: Any) -> dict[str, float]:
        """As the Trainer does; warns if the records are those of training."""
        warn_of_training_records(eval_dataset, self.train_dataset)
        return super().evaluate(eval_dataset, *args, **more)

    def predict(self, test_dataset: Any, *args: Any, **more: Any) -> Any:
        """As the Trainer does; warns if the records are those of training."""
        warn_of_training_records(test_dataset, self.train_dataset)
        return super().predict(test_dataset, *args, **more)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the epsilon spent in place of the training loss; if that is asked for too, it is named not private."""
        if self.private is not None and _NOT_PRIVATE.keys() & logs.keys():
            shown = {key: value for key, value in logs.items() if key not in _NOT_PRIVATE}
            if self.log_not_private_loss:
                shown |= {new: logs[key] for key, new in _NOT_PRIVATE.items() if key in logs}
            logs.clear()  # the Trainer returns this very object
            logs |= shown | {"epsilon": self.private.spent().epsilon}
        super().log(logs, start_time)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.private is not None:
            self.private.save_checkpoint(Path(output_dir) / CHECKPOINT)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput:
        """End the run: model and optimizer are plain again, and the keys of a finished run are removed from checkpoints."""
        assert self.private is not None
        self.private.refuse_unstepped()
        output = super()._finalize_training(trial, num_train_samples, start_time)
        self.private.detach()
        if self.private.steps_taken == self.private.plan.steps and self.is_world_process_zero():
            for saved in Path(self.args.output_dir).glob(f"checkpoint-*/{CHECKPOINT}"):
                saved.unlink()
        return output if self.log_not_private_loss else output._replace(training_loss=float("nan"))


def _refuse_overridden(trainer: type[PrivateTrainer]) -> None:
    """Raises InvalidType for a subclass that trains in another way, MissingLibrary for a Trainer of another version."""
    missing = [name for name in _RELIED_ON if name not in vars(Trainer)]
    if missing:
        raise MissingLibrary(
            f"PrivateTrainer is made for transformers 5.22, and the Trainer of this version has no {missing[0]}: install "
            "that version."
        )
    for name in ("training_step", "get_train_dataloader"):
        if getattr(trainer, name) is not getattr(PrivateTrainer, name):
            raise InvalidType(
                f"{trainer.__name__} has its own {name}, which private training does not use: override "
                "compute_record_losses(model, inputs) or compute_loss, which return one loss per record, and give the data "
                "as train_dataset and data_collator."
            )
