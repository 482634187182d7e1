"""Is the loss that is trained the model's own? Compared on single records, before training."""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from clipless.errors import InvalidArgument
from clipless.integrations.transformers.losses import REMEDY, decoder_inputs, record_losses, split_labels
from clipless.random_state import random_state_kept

MOST_RECORDS = 16
TOLERANCE = 1e-3


def refuse_other_loss(
    model: nn.Module, records: "DataLoader[Any]", prepare: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Raises InvalidArgument unless `record_losses` gives what the model itself gives for one record.

    The model is run in evaluation mode; its modes and the random state are restored.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), random_state_kept(model):
            for number in islice(range(len(records.dataset)), MOST_RECORDS):  # type: ignore[arg-type]
                agrees = _agrees(model, prepare(records.collate_fn([records.dataset[number]])))
                if agrees is None:
                    continue
                if not agrees:
                    raise InvalidArgument(f"the loss inside {type(model).__name__} is not known here: {REMEDY}")
                return
    finally:
        for module, training in modes.items():
            module.training = training
    raise InvalidArgument("none of the first records has a label: check the data set and the data collator.")


def _agrees(model: nn.Module, inputs: Mapping[str, Any]) -> bool | None:
    """Whether the two losses of a batch of one record agree; None if it has no label."""
    get = getattr(model, "get_base_model", None)
    base = get() if callable(get) else model
    given, labels = split_labels(inputs)
    own = model(**inputs)
    own = own["loss"] if isinstance(own, Mapping) and "loss" in own else None
    if own is None:
        raise InvalidArgument(f"{type(model).__name__} returns no loss for these inputs: {REMEDY}")
    ours = record_losses(base, model(**decoder_inputs(base, given, labels)), labels)
    if not bool(torch.isfinite(own)):
        return None
    return own.dim() == 0 and bool(torch.isclose(own.float(), ours.float().mean(), rtol=TOLERANCE, atol=TOLERANCE))
