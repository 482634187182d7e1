"""Settings of a Trainer that break the promise of a private run, each refused with what to do instead."""

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from transformers.trainer_utils import HubStrategy
from transformers.training_args import OptimizerNames, TrainingArguments

from clipless.errors import InvalidArgument

_ONE_BATCH_SIZE = "the plan rests on one batch size: set per_device_train_batch_size, the records of a micro-batch"
_OWN_SAMPLING = "batches are Poisson samples, whatever the records' lengths"
_NO_WRAPPER = "private training runs in plain processes: start them with torchrun, without it"
_KEYS = "it would publish the checkpoints, which hold the keys of the noise: choose 'end' or 'every_save'"


def _projects(args: Any) -> bool:
    return str(OptimizerNames(args.optim).value).startswith(("galore", "apollo"))


# What a setting is, whether it is on, and what to do instead.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "max_grad_norm",
        lambda args: args.max_grad_norm not in (0, 0.0, 1.0),
        "it would clip the noised gradient of the batch, and privacy needs every record's own clipped: choose that by "
        "clipping= of Privacy, and leave max_grad_norm at its default, which has no effect here",
    ),
    (
        "train_sampling_strategy",
        lambda args: args.train_sampling_strategy != "random",
        f"{_OWN_SAMPLING}: leave train_sampling_strategy (and group_by_length) out; a data set sorted by length has "
        "micro-batches of similar lengths, as a sample keeps its order",
    ),
    (
        "fp16",
        lambda args: args.fp16,
        "its gradient scaler would scale the gradients and not the noise: use bf16=True, which needs no scaler",
    ),
    ("auto_find_batch_size", lambda args: args.auto_find_batch_size, _ONE_BATCH_SIZE),
    (
        "torch_compile",
        lambda args: args.torch_compile,
        "compiled forward passes hide the layers whose per-sample gradients are clipped: leave it out",
    ),
    (
        "neftune_noise_alpha",
        lambda args: args.neftune_noise_alpha is not None,
        "it scales its noise by the padded length, which depends on the other records: leave it out",
    ),
    ("use_liger_kernel", lambda args: args.use_liger_kernel, "its fused loss averages over the batch: leave it out"),
    ("deepspeed", lambda args: args.deepspeed is not None, _NO_WRAPPER),
    ("fsdp", lambda args: bool(args.fsdp), _NO_WRAPPER),
    ("parallelism_config", lambda args: args.parallelism_config is not None, _NO_WRAPPER),
    (
        "optim",
        lambda args: any(kind in str(OptimizerNames(args.optim).value) for kind in ("lomo", "layerwise")),
        "it steps inside the backward pass, before there is noise: choose another, such as adamw_torch",
    ),
    (
        "optim",
        lambda args: _projects(args) and args.save_strategy != "no" and not args.save_only_model,
        "a checkpoint holds tensors and plain values, and its state holds projectors, so no run could be resumed: set "
        "save_strategy='no' or save_only_model=True, or choose another, such as adamw_torch",
    ),
    (
        "include_num_input_tokens_seen",
        lambda args: args.include_num_input_tokens_seen not in ("no", False),
        "the number of tokens drawn is not private: leave it out",
    ),
    (
        "skip_memory_metrics",
        lambda args: not args.skip_memory_metrics,
        "memory in use reveals the sizes of the batches drawn, which are not private: leave it at True",
    ),
    ("debug", lambda args: bool(args.debug), "it prints activations of training records, which are not private"),
    (
        "enable_jit_checkpoint",
        lambda args: args.enable_jit_checkpoint,
        "it saves in the middle of a batch: use save_strategy='steps'",
    ),
    (
        "hub_strategy",
        lambda args: args.push_to_hub and args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS),
        _KEYS,
    ),
)


def refuse_settings(args: TrainingArguments, **changed: Any) -> None:
    """Raises InvalidArgument for the first setting with which training would not be private. `changed` are settings that a
    trainer has taken over from its arguments, as they are now."""
    args = copy.copy(args)
    vars(args).update(changed)
    for name, is_on, remedy in _REFUSED:
        if is_on(args):
            raise InvalidArgument(f"{name}={getattr(args, name)!r} cannot be used in private training: {remedy}.")


def warn_of_training_records(evaluated: object, trained: object) -> None:
    """Warn if what is to be evaluated, one data set or several by name, are the records of training."""
    for data in evaluated.values() if isinstance(evaluated, Mapping) else (evaluated,):
        if trained is not None and (data is trained or getattr(data, "dataset", None) is trained):
            warnings.warn(
                "the evaluated records are those of train_dataset: metrics on training records are not private, nor is what "
                "is chosen by them, such as the best checkpoint.",
                stacklevel=3,
            )
