"""The engine as one function call without side effects."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clipless.clipped import ClippedSum, LossFunction
from clipless.clipping import Clipping, as_clipping
from clipless.errors import InvalidArgument
from clipless.gradients.capture.messages import refuse_nested_batch
from clipless.gradients.capture.watch import StateWatch
from clipless.gradients.engine import Engine
from clipless.gradients.kernels import Kernels
from clipless.gradients.moving_buffers import buffers_kept
from clipless.partition import partition
from clipless.random_state import random_state_kept
from clipless.torch_internals import pytree


def clipped_sum(model: nn.Module, loss_fn: LossFunction, batch: Any, clipping: str | Clipping = "auto-s") -> ClippedSum:
    """The sum over the batch of each record's clipped gradient: no noise, no division, nothing private about it.

    `loss_fn(model, batch)` returns one loss per record. It is run several times, since all is checked that a private run
    checks in its first step: the records stay apart, nothing is kept from one call to the next, and no gradient is lost. The
    model is left unchanged, even if it is refused.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> result = clipped_sum(model, lambda m, x: m(x)[:, 0], torch.tensor([[3.0, 4.0], [0.0, 0.5]]), "abadi")
    >>> result.grads["weight"], result.norms
    (tensor([[0.6000, 1.3000]]), tensor([[5.0000, 0.5000]]))
    """
    return engine_sum(model, loss_fn, batch, clipping, checked=True)


def engine_sum(
    model: nn.Module, loss_fn: LossFunction, batch: Any, clipping: str | Clipping, *, checked: bool
) -> ClippedSum:
    """As `clipped_sum`. If it is not `checked`, the result may be wrong: for comparisons that find out whether it is."""
    how = as_clipping(clipping)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    groups = partition(how.groups, names)
    thresholds = how.start(len(groups))
    kept_norms: list[Tensor] = []

    def factors(norms: Tensor, groups: Sequence[int]) -> Tensor:
        return how.factors(norms, thresholds[groups].to(norms), groups)

    refuse_nested_batch(batch)
    engine = Engine(model, groups, factors, kept_norms.append, Kernels(), checks_itself=checked)
    try:
        engine.attach()
        with buffers_kept(model.modules()):
            watch = StateWatch(model)
            watch.open(closely=True)
            records = count_records(model, loss_fn, batch)
            watch.refuse_pass(records)
            watch.counters.rewind()
            if records:
                engine.open(records, averaged=None, by_function=True)
                engine.run(loss_fn, batch, None)
                engine.refuse_unsound()
        sums = engine.complete()
    finally:
        engine.detach()
    return ClippedSum(sums, kept_norms[0] if kept_norms else torch.zeros(len(groups), records))


def per_record_losses(loss_fn: LossFunction, model: nn.Module, batch: Any, records: int) -> Tensor:
    losses = loss_fn(model, batch)
    if not isinstance(losses, Tensor) or losses.shape != (records,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InvalidArgument(f"loss_fn must return one loss per record, a tensor of shape ({records},), got {got}.")
    return losses


def count_records(model: nn.Module, loss_fn: LossFunction, batch: Any) -> int:
    """How many records a batch has: the number of losses it gives, found without gradients; 0 if it has no rows."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if leaves and leaves[0].shape[0] == 0:
        return 0
    with torch.no_grad(), random_state_kept(model):
        losses = loss_fn(model, batch)
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InvalidArgument(
            f"loss_fn must return one loss per record, a tensor of shape (B,), got {got}: use reduction='none'."
        )
    return len(losses)
