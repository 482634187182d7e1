"""From pieces to the clipped sum: norms of all records, factors from the rule, one weighted sum per parameter."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from clipless.clipping import Clipping, as_clipping
from clipless.errors import InvalidArgument
from clipless.grads.frames import Part
from clipless.grads.layout import random_state_kept
from clipless.grads.pieces import combine
from clipless.grads.tape import Tape
from clipless.partition import Partition, partition

Clip = Callable[[Tensor], Tensor]


class Engine:
    """Adds up clipped per-record gradients over the parts of a logical batch.

    `open(records, scale)` before each part's forward pass. `scale` undoes the loss's own division, so that norms are
    those of each record's own loss: the part's size for a mean, 1 for a sum. After backward the part's share is in
    `sums`, in at least float32, keyed by parameter name. A parameter that no record reached has no entry.
    """

    def __init__(self, model: nn.Module, groups: Partition, clip: Clip) -> None:
        self.sums: dict[str, Tensor] = {}
        self.seen = 0
        self._groups = groups
        self._clip = clip
        self._scale = 1.0
        self.tape = Tape(model, self._add)

    def clear(self) -> None:
        """Forget the sums: a new logical batch begins."""
        self.sums, self.seen = {}, 0
        self.tape.open(None)

    def open(self, records: int, scale: float) -> None:
        self._scale = scale
        self.tape.open(Part(records))

    def _add(self, part: Part) -> None:
        pieces = {name: combine(uses) for name, uses in part.pieces.items()}
        group_of = self._groups.group_of
        squares = self._zero_squares(part.records)
        for name, piece in pieces.items():
            squares[group_of[name]] += piece.sq_norms
        norms, finite = self._norms(squares)
        factors = self._clip(norms) * self._scale
        everyone = bool(finite.all())
        for name, piece in pieces.items():
            safe = piece if everyone else piece.keep(finite)
            share = safe.weighted_sum(factors[group_of[name]])
            self.sums[name] = self.sums[name] + share if name in self.sums else share
        self.seen += part.records

    def _zero_squares(self, records: int) -> Tensor:
        parameters = list(self.tape.parameters.values())
        dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
        return torch.zeros(len(self._groups), records, dtype=dtype, device=parameters[0].device)

    def _norms(self, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Norms [G,B] and which records are finite in every group; the others count as infinite in every group.

        Squares that small lose digits to underflow, and a norm taken for too small would give too large a factor:
        below the floor a norm counts as zero.
        """
        norms = squares.sqrt()
        norms = torch.where(norms < 1e4 * torch.finfo(norms.dtype).tiny ** 0.5, 0.0, norms) * self._scale
        finite = norms.isfinite().all(0)
        return torch.where(finite, norms, torch.inf), finite


@dataclass(frozen=True)
class ClippedSum:
    """The clipped sum by parameter name, and the norms [G,B] that it was clipped by. Neither is private."""

    grads: dict[str, Tensor]
    norms: Tensor


LossFunction = Callable[[nn.Module, Any], Tensor]


def clipped_sum(model: nn.Module, loss_fn: LossFunction, batch: Any, clipping: str | Clipping = "auto-s") -> ClippedSum:
    """The sum over the batch of each record's clipped gradient: no noise, no division, nothing private about it.

    `loss_fn(model, batch)` returns one loss per record. The model is left as it was.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> result = clipped_sum(model, lambda m, x: m(x)[:, 0], torch.tensor([[3.0, 4.0], [0.0, 0.5]]), "abadi")
    >>> result.grads["weight"], result.norms
    (tensor([[0.6000, 1.3000]]), tensor([[5.0000, 0.5000]]))
    """
    how = as_clipping(clipping)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    groups = partition(how.groups, names)
    thresholds = how.start(len(groups))
    kept_norms: list[Tensor] = []

    def clip(norms: Tensor) -> Tensor:
        kept_norms.append(norms)
        return how.rule(norms, thresholds.to(norms))

    engine = Engine(model, groups, clip)
    records = count_records(model, loss_fn, batch)
    if records:
        engine.tape.attach()
        try:
            engine.open(records, scale=1.0)
            per_record_losses(loss_fn, model, batch, records).sum().backward()
        finally:
            engine.tape.detach()
    grads = {name: engine.sums.get(name, torch.zeros_like(p)) for name, p in engine.tape.parameters.items()}
    return ClippedSum(grads, kept_norms[0] if kept_norms else torch.zeros(len(groups), records))


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
