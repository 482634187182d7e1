"""One loss per record, from a Hugging Face model's output: what the model's own loss is for a batch of that record alone.

The losses inside the models average over the batch, token losses over all its tokens, so a record's share would depend on
the others. Here tokens are averaged within their record.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


class Terms(NamedTuple):
    """The values of a loss, [b,n], of which those that count, [b,n], are averaged: within each record by private training,
    over the whole batch by the model itself."""

    values: Tensor
    counted: Tensor

    def of_records(self) -> Tensor:
        """The mean of each record; zero for one of which nothing counts."""
        return self.values.sum(1) / self.counted.sum(1).clamp(min=1)

    def of_batch(self) -> Tensor:
        """The mean of all; not a number if nothing counts."""
        return self.values.sum() / self.counted.sum()


def record_losses(
    model: nn.Module, outputs: Any, labels: Mapping[str, Tensor], smoothing: float = 0.0, shifted: bool | None = None
) -> Tensor:
    """One loss per record, (B,). Raises InvalidArgument for a task whose loss is not known here.

    Args:
        model: The model, without adapters around it.
        outputs: What it returned.
        labels: The labels, as `split_labels` finds them.
        smoothing: How far labels are smoothed.
        shifted: Whether the logits of a token predict the next one's label; None asks the model's class.
    """
    terms = loss_terms(model, outputs, labels, smoothing, shifts(model) if shifted is None else shifted)
    return torch.stack([term.of_records() for term in terms]).mean(0)


def batch_loss(model: nn.Module, outputs: Any, labels: Mapping[str, Tensor], shifted: bool) -> Tensor:
    """What the model itself would return for the whole batch."""
    return torch.stack([term.of_batch() for term in loss_terms(model, outputs, labels, 0.0, shifted)]).mean()


def own_loss(outputs: Any) -> Tensor | None:
    """The loss among what a model returned, wherever it is; None if there is none."""
    if isinstance(outputs, Mapping):
        outputs = [outputs["loss"]] if outputs.get("loss") is not None else []
    elif not isinstance(outputs, tuple | list):
        outputs = [vars(outputs).get("loss")]
    found = [value for value in outputs if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()]
    return found[0] if found else None


def loss_terms(
    model: nn.Module, outputs: Any, labels: Mapping[str, Tensor], smoothing: float, shifted: bool
) -> list[Terms]:
    """What the loss is averaged of: one set of values, or several whose means are averaged."""
    if {"start_positions", "end_positions"} <= labels.keys():
        pairs = zip(
            _logits(outputs, ("start_logits", "end_logits")), ("start_positions", "end_positions"), strict=False
        )
        terms = [_position_terms(logits, labels[name]) for logits, name in pairs]
        if len(terms) == 2:
            return terms
    found = _logits(outputs, ("logits",))
    if "labels" in labels and found:
        (logits,), wanted = found, labels["labels"]
        if logits.dim() == 2:
            return [_class_terms(model, logits, wanted, smoothing)]
        if logits.dim() == 3 and wanted.dim() == 2:
            return [_token_terms(logits, wanted, smoothing, shifted)]
    raise InvalidArgument(f"{type(model).__name__} with labels {sorted(labels)} has no known loss: {REMEDY}")


def _logits(outputs: Any, names: Sequence[str]) -> list[Tensor]:
    """The outputs of these names; of a tuple its first ones."""
    if isinstance(outputs, Tensor):
        found = [outputs]
    elif isinstance(outputs, tuple | list):
        tensors = (value for value in outputs if isinstance(value, Tensor))
        found = [value for value in tensors if value.dim() > 1 and value.is_floating_point()][: len(names)]
    else:
        named = outputs if isinstance(outputs, Mapping) else vars(outputs)
        found = [named[name] for name in names if isinstance(named.get(name), Tensor)]
    return found


def _everything(values: Tensor) -> Terms:
    return Terms(values, torch.ones_like(values, dtype=torch.bool))


def _position_terms(logits: Tensor, positions: Tensor) -> Terms:
    """Cross-entropy of a start or end position; positions outside the text do not count."""
    outside = logits.size(1)
    clamped = positions.view(len(logits)).clamp(0, outside)
    values = F.cross_entropy(logits, clamped, ignore_index=outside, reduction="none")
    return Terms(values.unsqueeze(1), (clamped != outside).unsqueeze(1))


def _class_terms(model: nn.Module, logits: Tensor, labels: Tensor, smoothing: float) -> Terms:
    config = getattr(model, "config", None)
    problem = getattr(config, "problem_type", None)
    if problem is None:
        whole = labels.dtype in (torch.long, torch.int)
        problem = "single_label_classification" if whole else "multi_label_classification"
        problem = "regression" if logits.size(1) == 1 else problem
    if problem == "regression":
        return _everything(F.mse_loss(logits, labels.view_as(logits).to(logits.dtype), reduction="none"))
    if problem == "multi_label_classification":
        return _everything(F.binary_cross_entropy_with_logits(logits, labels, reduction="none"))
    labels = labels.view(len(logits))
    values = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    return Terms(values.unsqueeze(1), (labels != IGNORED).unsqueeze(1))


def _token_terms(logits: Tensor, labels: Tensor, smoothing: float, shifted: bool) -> Terms:
    """Every labelled token counts."""
    labels = F.pad(labels, (logits.size(1) - labels.size(1), 0), value=IGNORED)  # a learned prompt has no labels
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    values = F.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    )
    return Terms(values, labels != IGNORED)


def shifts(model: nn.Module) -> bool:
    """Whether a model of this class takes the logits at a position to predict the label of the next one."""
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "ForCausalLM")
    return loss is ForCausalLMLoss and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
