"""Is the loss that is trained the model's own? Compared before training, on single records and on several together, at the
model's weights and at others: a layer that begins at zero gives every loss the same value, and class weights vanish from the
mean of a single record."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from clipless.errors import InvalidArgument
from clipless.gradients import weights_shaken
from clipless.integrations.transformers.losses import (
    REMEDY,
    batch_loss,
    decoder_inputs,
    own_loss,
    shifts,
    split_labels,
)
from clipless.random_state import random_state_kept

# So many of the first records are looked at, to find a few that have labels, and so many sets of weights besides the given
# ones.
MOST_RECORDS, FEW, SHAKEN = 16, 4, 2
# How far the same loss may be from itself, relative, in types of 32 bits and of 16.
TOLERANCE, HALF_TOLERANCE = 1e-5, 2e-2

Inputs = dict[str, Any]


def shift_of_loss(model: nn.Module, records: "DataLoader[Any]", prepare: Callable[[Inputs], Inputs]) -> bool:
    """Whether the logits of a token predict the next one's label, so that the known loss is the model's own. Raises
    InvalidArgument if it is not in either way.

    The model is run in evaluation mode; its weights, its modes and the random state are restored.
    """
    get = getattr(model, "get_base_model", None)
    base = get() if callable(get) else model
    if getattr(getattr(base, "config", None), "output_router_logits", False):
        raise InvalidArgument(
            "the router's auxiliary loss is about all tokens of a batch, not about each record's own: build the model with "
            "output_router_logits=False."
        )
    with _evaluating(model), torch.no_grad(), random_state_kept(model):
        batches = _labelled(model, records, prepare)
        possible = [shifts(base), not shifts(base)]
        for number in range(SHAKEN + 1):
            with weights_shaken(model, number) if number else nullcontext():
                for inputs in batches:
                    possible = _agreeing(model, base, inputs, possible)
    if not possible:
        raise InvalidArgument(f"the loss inside {type(base).__name__} is not known here: {REMEDY}")
    return possible[0]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _labelled(model: nn.Module, records: "DataLoader[Any]", prepare: Callable[[Inputs], Inputs]) -> list[Inputs]:
    """A few records with labels, each as a batch of its own, and all of them as one."""
    samples: list[Any] = []
    batches: list[Inputs] = []
    for number in islice(range(len(records.dataset)), MOST_RECORDS):  # type: ignore[arg-type]
        sample = records.dataset[number]
        inputs = prepare(records.collate_fn([sample]))
        if len(batches) < FEW and bool(_own(model, inputs).isfinite()):
            samples.append(sample)
            batches.append(inputs)
    if not batches:
        raise InvalidArgument("none of the first records has a label: check the data set and the data collator.")
    return [*batches, prepare(records.collate_fn(samples))] if len(samples) > 1 else batches


def _own(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """What the model itself returns as the loss of a batch."""
    loss = own_loss(model(**inputs))
    if loss is None:
        raise InvalidArgument(f"{type(model).__name__} returns no loss for these inputs: {REMEDY}")
    return loss


def _agreeing(model: nn.Module, base: nn.Module, inputs: Inputs, possible: list[bool]) -> list[bool]:
    """Of these ways to read the logits, those that give the loss that the model returns, from the same random numbers."""
    with random_state_kept(model):
        own = _own(model, inputs).double()
    given, labels = split_labels(inputs)
    with random_state_kept(model):
        outputs = model(**decoder_inputs(base, given, labels))
    half = any(p.is_floating_point() and p.element_size() < 4 for p in model.parameters())
    allowed = (HALF_TOLERANCE if half else TOLERANCE) * float(own.abs())
    if not bool(own.isfinite()):
        return possible
    return [
        shifted
        for shifted in possible
        if abs(float(batch_loss(base, outputs, labels, shifted) - own)) <= allowed + TOLERANCE**2
    ]
