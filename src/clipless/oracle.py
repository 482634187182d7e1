"""The reference: the clipped sum computed from its definition, one record at a time, with plain autograd.

Shares no code with the engine, which is tested against it.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from clipless import defaults
from clipless.clipped import ClippedSum, LossFunction
from clipless.clipping import Clipping, as_clipping, least_norm
from clipless.errors import InvalidArgument
from clipless.partition import partition
from clipless.torch_internals import pytree


def clipped_sum(
    model: nn.Module, loss_fn: LossFunction, batch: Any, clipping: str | Clipping = defaults.CLIPPING
) -> ClippedSum:
    """As `clipless.clipped_sum`, by a loop over batches of one record. Every tensor of `batch` has a row per record."""
    how = as_clipping(clipping)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = partition(how.groups, parameters)
    thresholds = how.start(len(groups))
    records = _count_records(model, loss_fn, batch)
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters.values()), torch.float32)
    norms = torch.zeros(len(groups), records, dtype=dtype)
    for b in range(records):
        record = one_record(batch, b, records)
        grads = _gradients(_losses(loss_fn, model, record, 1).sum(), parameters)
        for g, members in enumerate(groups.members):
            squares = sum(grads[name].double().square().sum() for name in members)
            norms[g, b] = torch.as_tensor(squares).to(dtype).sqrt()
        norms[:, b] = norms[:, b].nan_to_num(nan=torch.inf, posinf=torch.inf)
        norms[:, b].masked_fill_(norms[:, b] <= least_norm(dtype), 0.0)
        finite = norms[:, b].isfinite()
        if not finite.all() and not _finite(record):
            finite[:] = False
            norms[:, b] = torch.inf
        factors = how.factors(norms[:, b : b + 1], thresholds, range(len(groups)))
        factors = factors.masked_fill(norms[:, b : b + 1] == 0, 0.0)
        for name, grad in grads.items():
            if finite[groups.group_of[name]]:
                sums[name] += factors[groups.group_of[name], 0].double() * grad.double()
    return ClippedSum({name: value.to(parameters[name].dtype) for name, value in sums.items()}, norms)


def one_record(batch: Any, record: int, records: int) -> Any:
    """The batch that holds this record alone."""

    def row(leaf: Any) -> Any:
        per_record = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == records
        return leaf[record : record + 1] if per_record else leaf

    return pytree.tree_map(row, batch)


def _count_records(model: nn.Module, loss_fn: LossFunction, batch: Any) -> int:
    """The number of losses that the batch gives; 0 if it has no rows. Torch's random state is restored."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if leaves and leaves[0].shape[0] == 0:
        return 0
    with torch.no_grad(), torch.random.fork_rng():
        return len(_losses(loss_fn, model, batch, None))


def _losses(loss_fn: LossFunction, model: nn.Module, batch: Any, records: int | None) -> Tensor:
    """One loss per record, checked; None stands for any number of records."""
    losses = loss_fn(model, batch)
    one_each = isinstance(losses, Tensor) and losses.dim() == 1 and records in (None, len(losses))
    if not one_each:
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InvalidArgument(
            f"loss_fn must return one loss per record, a tensor of shape ({records or 'B'},), got {got}: use "
            "reduction='none'."
        )
    return losses


def _finite(record: Any) -> bool:
    """Whether all floating-point numbers of a record are finite."""
    leaves = [leaf for leaf in pytree.tree_leaves(record) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(leaf.isfinite().all()) for leaf in leaves)


def _gradients(loss: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if grad is None else grad.to_dense()
        for (name, p), grad in zip(parameters.items(), grads, strict=True)
    }
