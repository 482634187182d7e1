"""Does a record's gradient depend on how far it is padded? Compared on two records, before training.

A collator that pads to the longest record of a batch tells every record how long the others are. Where the model masks the
padding, that makes no difference. Where it does not, one record's gradient depends on the others, and its bound says nothing
about theirs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from clipless.errors import InvalidArgument
from clipless.random_state import random_state_kept

MOST_RECORDS = 32
# How far two computations of a parameter's gradient may be from each other, relative to it, and how small a part of the
# whole gradient is not looked at: rounding, in types of 32 bits and of 16.
TOLERANCE, NEGLIGIBLE = 1e-2, 1e-5
HALF_TOLERANCE, HALF_NEGLIGIBLE = 0.2, 1e-2

Inputs = Mapping[str, Any]


def refuse_unmasked_padding(
    model: nn.Module, records: "DataLoader[Any]", losses: Callable[[dict[str, Any]], Tensor]
) -> None:
    """Raises InvalidArgument if the gradient of a short record changes when it is padded to the length of a long one. (Its
    loss may hardly change in a model that has learned nothing yet.)

    The two are the shortest and the longest of some records. A collator that changes records at random, or divides them
    otherwise, is not judged. The model is run in evaluation mode; its modes and the random state are restored.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with random_state_kept(model):
            pair = _short_and_long(records)
            if pair is None:
                return
            alone, together = records.collate_fn(pair[:1]), records.collate_fn(pair)
            if not _is_padded(alone, together):
                return
            found = [_first_gradient(model, losses(dict(inputs))) for inputs in (alone, together)]
    finally:
        for module, training in modes.items():
            module.training = training
    half = any(p.is_floating_point() and p.element_size() < 4 for p in model.parameters())
    allowed, least = (HALF_TOLERANCE, HALF_NEGLIGIBLE) if half else (TOLERANCE, NEGLIGIBLE)
    lengths = [max(_norm(one), _norm(other)) for one, other in zip(*found, strict=True)]
    moved = [_norm(one - other) for one, other in zip(*found, strict=True)]
    whole = sum(length**2 for length in lengths) ** 0.5
    if any(
        length > least * whole and distance > allowed * length for length, distance in zip(lengths, moved, strict=True)
    ):
        raise InvalidArgument(
            "a record's gradient depends on how far it is padded, and so on the other records of its batch: have the data "
            "collator give the attention_mask (and position_ids, if it pads on the left) that the model needs to leave "
            "padding out, or pad every record to one length, padding='max_length'."
        )


def _first_gradient(model: nn.Module, losses: Tensor) -> list[Tensor]:
    """The gradient of the first record's loss; nothing if that is no loss for each record, which training refuses."""
    if not isinstance(losses, Tensor) or losses.dim() != 1 or not losses.requires_grad:
        return []
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(losses[0], trained, allow_unused=True)
    return [p.new_zeros(()) if grad is None else grad for p, grad in zip(trained, found, strict=True)]


def _norm(tensor: Tensor) -> float:
    return float(tensor.float().norm())


def _short_and_long(records: "DataLoader[Any]") -> list[Any] | None:
    """The shortest and the longest of some records, evenly spaced; None if all are of one length."""
    data: Any = records.dataset
    count = min(len(data), MOST_RECORDS)
    some = [data[number * (len(data) - 1) // max(1, count - 1)] for number in range(count)]
    lengths = [sum(value.numel() for value in _tensors(records.collate_fn([record])).values()) for record in some]
    if min(lengths) == max(lengths):
        return None
    return [some[lengths.index(min(lengths))], some[lengths.index(max(lengths))]]


def _tensors(inputs: object) -> dict[str, Tensor]:
    return (
        {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        if isinstance(inputs, Mapping)
        else {}
    )


def _is_padded(alone: Inputs, together: Inputs) -> bool:
    """Whether the first record of the second batch is that of the first, with something before or after it."""
    padded, one, two = False, _tensors(alone), _tensors(together)
    for name, value in one.items():
        longer = two.get(name)
        if longer is None or longer.dim() != value.dim() or len(longer) != 2:
            return False
        if value.dim() < 2:
            continue
        size, row = value.shape[1], longer[0]
        if size > len(row) or not (torch.equal(row[:size], value[0]) or torch.equal(row[len(row) - size :], value[0])):
            return False
        padded = padded or len(row) > size
    return padded
