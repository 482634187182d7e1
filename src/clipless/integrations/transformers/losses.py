"""One loss per record, from a Hugging Face model's output: what the model's own loss is for a batch of that record alone.

The losses inside the models average over the batch, token losses over all its tokens, so a record's share would depend on
the others. Here tokens are averaged within their record.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from clipless.errors import InvalidArgument

LABELS = ("labels", "start_positions", "end_positions")
IGNORED = -100
REMEDY = (
    "give compute_loss_func=f, or override compute_record_losses(model, inputs), to return one loss per record: a tensor of "
    "shape (batch,), with a record's tokens averaged among themselves."
)


def split_labels(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The model's inputs without the labels, and the labels."""
    labels = {name: inputs[name] for name in LABELS if inputs.get(name) is not None}
    return {name: value for name, value in inputs.items() if name not in LABELS}, labels


def decoder_inputs(model: nn.Module, inputs: dict[str, Any], labels: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inputs with those of the decoder, which an encoder-decoder model would make from its labels."""
    needed = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "labels" in labels
    if not needed or {"decoder_input_ids", "decoder_inputs_embeds"} & inputs.keys():
        return inputs
    shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shifted is None or labels["labels"].dim() != 2:
        raise InvalidArgument(
            f"{type(model).__name__} needs decoder_input_ids beside the labels: use "
            "DataCollatorForSeq2Seq(tokenizer, model=model), or make them part of the data set."
        )
    return {**inputs, "decoder_input_ids": shifted(labels=labels["labels"])}


def record_losses(model: nn.Module, outputs: Any, labels: Mapping[str, Tensor], smoothing: float = 0.0) -> Tensor:
    """One loss per record, (B,). Raises InvalidArgument for a task whose loss is not known here."""
    if {"start_positions", "end_positions"} <= labels.keys():
        pairs = ((outputs["start_logits"], "start_positions"), (outputs["end_logits"], "end_positions"))
        return torch.stack([_position_losses(logits, labels[name]) for logits, name in pairs]).mean(0)
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if "labels" not in labels or not isinstance(logits, Tensor):
        raise InvalidArgument(f"{type(model).__name__} with labels {sorted(labels)} has no known loss: {REMEDY}")
    if logits.dim() == 2:
        return _class_losses(model, logits, labels["labels"], smoothing)
    if logits.dim() == 3 and labels["labels"].dim() == 2:
        return _token_losses(logits, labels["labels"], smoothing, shifted=_shifts(model))
    raise InvalidArgument(
        f"{type(model).__name__} with logits of {logits.dim()} dimensions has no known loss: {REMEDY}"
    )


def _position_losses(logits: Tensor, positions: Tensor) -> Tensor:
    """Cross-entropy of a start or end position; positions outside the text count as zero."""
    outside = logits.size(1)
    clamped = positions.view(len(logits)).clamp(0, outside)
    return F.cross_entropy(logits, clamped, ignore_index=outside, reduction="none")


def _class_losses(model: nn.Module, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    config = getattr(model, "config", None)
    problem = getattr(config, "problem_type", None)
    if problem is None:
        whole = labels.dtype in (torch.long, torch.int)
        problem = "single_label_classification" if whole else "multi_label_classification"
        problem = "regression" if logits.size(1) == 1 else problem
    if problem == "regression":
        return F.mse_loss(logits, labels.view_as(logits).to(logits.dtype), reduction="none").mean(1)
    if problem == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
    return F.cross_entropy(logits, labels.view(len(logits)), reduction="none", label_smoothing=smoothing)


def _token_losses(logits: Tensor, labels: Tensor, smoothing: float, shifted: bool) -> Tensor:
    """The mean over each record's labelled tokens; zero for a record without any."""
    labels = F.pad(labels, (logits.size(1) - labels.size(1), 0), value=IGNORED)  # a learned prompt has no labels
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    )
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def _shifts(model: nn.Module) -> bool:
    """Whether the logits at a position predict the label of the next one."""
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "ForCausalLM")
    return loss is ForCausalLMLoss and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
