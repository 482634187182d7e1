"""Checks on a loss that arrives as one number, by `loss.backward()`, in a checked pass.

A number does not tell what each record added to it. Three things can be seen in the graph between the model's outputs and
the loss: its reduction, where the last operation names one; a division by something that the other records have; and
curvature. If the records' losses are added up, the second derivative of the loss between two records' outputs is zero. So
is that of a piecewise linear coupling, and of one by detached numbers: only `private.step` sees these.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from clipless.errors import Misuse
from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.checks.seeds import shuffled, some_of

# Second derivatives across records that count, relative to those within: there is nothing to round where records stay apart.
CURVED = 1e-6
_REDUCTIONS = {1: "mean", 2: "sum"}
# Operations after which a loss is still the mean, or still the sum.
_ADDITIONS = ("Add", "Sub", "Neg", "Alias", "View", "Squeeze", "ToCopy")
_FACTORS = ("Mul", "Div")


def refuse_scalar(loss: Tensor, passes: Sequence[ForwardPass], records: int, number: int, averaged: bool) -> None:
    """Raise if the loss is visibly not the mean, or the sum, of one loss for each record."""
    if records > 1:
        for node in _telling(loss.grad_fn):
            _refuse_other_reduction(node, averaged)
            _refuse_weighted_mean(node)
        _refuse_curved(loss, passes, records, number)


def _telling(node: Any) -> Iterator[Any]:
    """The nodes at the end of the graph that tell how the loss was reduced."""
    waiting = [] if node is None else [node]
    while waiting:
        last = waiting.pop()
        # One of several sums that are added up may be of something else than losses, such as weights.
        if _reduction(last) is not None and (last is node or isinstance(getattr(last, "_saved_reduction", None), int)):
            yield last
        elif last.name().startswith(_ADDITIONS):
            waiting += [follower for follower, _ in last.next_functions if follower is not None]


def _reduction(node: Any) -> str | None:
    """What a node says of its reduction. A sum of products may be a mean: nothing is said of it."""
    reduction = getattr(node, "_saved_reduction", None)
    if isinstance(reduction, int):
        return _REDUCTIONS.get(reduction)
    if node.name().startswith("MeanBackward"):
        return "mean"
    before = [follower for follower, _ in node.next_functions if follower is not None]
    scaled = any(follower.name().startswith(_FACTORS) for follower in before)
    return "sum" if node.name().startswith("SumBackward") and not scaled else None


def _refuse_other_reduction(node: Any, averaged: bool) -> None:
    found, stated = _reduction(node), "mean" if averaged else "sum"
    if found != stated:
        raise Misuse(
            f"the loss is a {found} ({node.name()}), but loss_reduction={stated!r} was given to make_private. Pass "
            f"loss_reduction={found!r}, or call private.step(record_losses, batch) with one loss per record."
        )


def _refuse_weighted_mean(node: Any) -> None:
    """Raise for a mean that divides by class weights, or by the number of targets that are not ignored."""
    if not node.name().startswith("NllLoss") or _reduction(node) != "mean":
        return
    if node._saved_weight is not None or float(node._saved_total_weight) != node._saved_target.numel():
        raise Misuse(
            "the loss is a mean that divides by class weights or by the number of targets that are not ignored, so every "
            "record's share depends on the others. Call private.step(record_losses, batch) with one loss per record: "
            "reduction='none', averaged over each record's own targets."
        )


def _refuse_curved(loss: Tensor, passes: Sequence[ForwardPass], records: int, number: int) -> None:
    """Raise if the second derivative of the loss between two halves of the records is not zero."""
    located = [pair for one in passes for pair in zip(one.tapped, one.out_dims, strict=True)]
    found = [(output, _of_records(output, dim, records)) for output, dim in located]
    pairs = [(output, dim) for output, dim in found if dim is not None]
    if not pairs or not loss.requires_grad:
        return
    some, outputs = some_of(records, number), [output for output, _ in pairs]
    try:
        with torch.enable_grad():
            grads = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
            product = sum(
                (_masked(grad, dim, some, records) * _directions(grad)).sum()
                for grad, (_, dim) in zip(grads, pairs, strict=True)
                if grad is not None and grad.requires_grad
            )
            if not isinstance(product, Tensor) or not product.requires_grad:
                return
            curved = torch.autograd.grad(product, outputs, retain_graph=True, allow_unused=True)
    except (RuntimeError, NotImplementedError) as refused:
        raise Misuse(
            "the loss cannot be differentiated twice, so loss.backward() does not show whether it couples the records "
            f"({str(refused).splitlines()[0]}). Call private.step(record_losses, batch) with one loss per record."
        ) from refused
    pieces = [(c, dim) for c, (_, dim) in zip(curved, pairs, strict=True) if c is not None]
    across = max((float(_masked(c, dim, ~some, records).abs().max()) for c, dim in pieces), default=0.0)
    if across > CURVED * max((float(c.abs().max()) for c, _ in pieces), default=0.0):
        flat = any(dim is None for _, dim in located)
        raise Misuse(
            "the loss couples the records: how one record's output moves it depends on the outputs of others (pairs, a "
            "statistic of the batch, a root or a logarithm of a mean)"
            f"{', or rows of the output are not in the order of the records' if flat else ''}. Compute one loss per record, "
            "each from that record alone, and call private.step(record_losses, batch)."
        )


def _of_records(output: Tensor, dim: int | None, records: int) -> int | None:
    """The dimension of an output along which rows are in the order of the records; None if there is none."""
    if dim is not None:
        return dim
    return 0 if output.dim() and len(output) and len(output) % records == 0 else None


def _masked(tensor: Tensor, dim: int, some: Tensor, records: int) -> Tensor:
    rows = some.to(tensor.device).repeat_interleave(tensor.shape[dim] // records)
    return tensor * rows.to(tensor.dtype).view([-1 if k == dim else 1 for k in range(tensor.dim())])


def _directions(like: Tensor) -> Tensor:
    """Numbers without a pattern, for a product in which nothing cancels."""
    count = like.numel()
    return (shuffled(count, 1) / count - 0.5).view(like.shape).to(like.device, like.dtype)
