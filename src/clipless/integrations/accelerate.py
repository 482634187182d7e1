"""Accelerate: a private run on a model and an optimizer that an `Accelerator` prepares.

The data are not prepared: batches are drawn, and divided over the processes, by `private.loader`. See docs/huggingface.md.
"""

from typing import Any, NamedTuple

from accelerate import Accelerator
from accelerate.utils import DynamoBackend, send_to_device
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from clipless.errors import InvalidArgument, InvalidType
from clipless.gradients import Kernels
from clipless.privacy import Privacy
from clipless.private import Private, make_private

__all__ = ["Prepared", "prepare_private", "send_to_device"]


class Prepared(NamedTuple):
    """What `accelerator.prepare` returns for the model and the optimizer, and the private run on them."""

    model: nn.Module
    optimizer: Any
    private: Private


def prepare_private(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    dataset: "Dataset[Any] | DataLoader[Any]",
    *,
    privacy: Privacy,
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    loss_reduction: str | None = None,
    kernels: Kernels | None = None,
) -> Prepared:
    """Prepare model and optimizer, and make them private. Raises for an Accelerator that would break the promise.

    Train by `private.step(record_losses, batch)` on the batches of `private.loader`, which `record_losses` moves by
    `send_to_device(batch, accelerator.device)`; or, with `loss_reduction`, by `accelerator.backward(loss)`. Do not prepare
    the scheduler: it would step once for every process. `batch_size` is the expected batch of all processes together.
    """
    if not isinstance(privacy, Privacy):
        raise InvalidType(f"privacy must be a clipless.Privacy(epsilon=..., ...), got {type(privacy).__name__}.")
    _refuse(accelerator)
    model, wrapped = accelerator.prepare(model, optimizer)
    private = make_private(
        model,
        optimizer,
        dataset,
        **privacy.arguments(),
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        loss_reduction=loss_reduction,
        kernels=kernels,
    )
    return Prepared(model, wrapped, private)


def _refuse(accelerator: Accelerator) -> None:
    """Raises InvalidArgument for settings of the Accelerator with which training would not be private."""
    state = accelerator.state
    refused = {
        "mixed_precision='fp16' scales the gradients and not the noise: use 'bf16'": accelerator.mixed_precision
        == "fp16",
        "gradient_accumulation_steps above 1 would step on several batches at once: leave it at 1, and iterate over "
        "private.loader.microbatches(n)": accelerator.gradient_accumulation_steps != 1,
        "a DeepSpeed plugin takes over the optimizer: leave it out": getattr(state, "deepspeed_plugin", None)
        is not None,
        "an FSDP plugin shards the model in its own way: leave it out, and call fully_shard and make_private yourself "
        "(docs/distributed.md)": getattr(state, "fsdp_plugin", None) is not None,
        "dynamo_backend compiles the forward pass, which hides the layers: leave it out": state.dynamo_plugin.backend
        != DynamoBackend.NO,
    }
    for reason, is_on in refused.items():
        if is_on:
            raise InvalidArgument(f"this Accelerator cannot be used for private training: {reason}.")
