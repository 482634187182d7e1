"""check: does this model, with this loss, keep the promise? Measured on a few records before any training."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from clipless import oracle
from clipless.clipping import Clipping, as_clipping
from clipless.errors import CliplessError, Unsound
from clipless.grads.engine import ClippedSum, LossFunction, clipped_sum, count_records
from clipless.grads.layout import random_state_kept
from clipless.grads.rules import generic, rule_of
from clipless.partition import partition
from clipless.plan import sensitivity

MOST_RECORDS = 8
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Handling:
    """How one parameter's per-record gradient is obtained: by a layer rule, the generic fallback, or not (frozen)."""

    parameter: str
    shape: tuple[int, ...]
    how: str


@dataclass(frozen=True)
class CheckReport:
    """What `clipless.check` found. `problems` is empty for a sound model."""

    handling: tuple[Handling, ...]
    records: int
    oracle_error: float
    largest_change: float
    sensitivity: float
    changed_buffers: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return not self.problems

    def raise_if_unsound(self) -> None:
        """Raise `Unsound` with everything that is wrong."""
        if self.problems:
            raise Unsound("\n".join(self.problems))

    def __str__(self) -> str:
        width = max((len(row.parameter) for row in self.handling), default=0)
        rows = [f"{row.parameter:<{width}}  {row.how:<12}  {row.shape}" for row in self.handling]
        verdict = "sound" if self.sound else "UNSOUND\n" + "\n".join(self.problems)
        figures = [
            f"against the oracle, {self.records} records: relative error {self.oracle_error:.1e}",
            f"one record removed: sum moves by {self.largest_change:.4g}, sensitivity {self.sensitivity:.4g}",
        ]
        return "\n".join([*rows, *figures, verdict])


def check(model: nn.Module, loss_fn: LossFunction, batch: Any, clipping: str | Clipping = "auto-s") -> CheckReport:
    """Run the engine against the oracle, remove each record in turn, and look for buffers that training would change.

    `loss_fn(model, batch)` returns one loss per record; the first few records of the batch are used. The model is left
    as it was. Randomness (dropout) is turned off for the comparison. Nothing in the report is private.
    """
    how = as_clipping(clipping)
    groups = partition(how.groups, [name for name, p in model.named_parameters() if p.requires_grad])
    bound = float(sensitivity(how.start(len(groups))))
    problems: list[str] = []
    records, error, change = 0, float("nan"), float("nan")
    changed = _changed_buffers(model, loss_fn, batch)
    try:
        subject = _without_dropout(model)
        few = _first(batch, count_records(subject, loss_fn, batch))
        records = count_records(subject, loss_fn, few)
        whole = clipped_sum(subject, loss_fn, few, how)
        error = relative_error(whole, oracle.clipped_sum(subject, loss_fn, few, how))
        change = max(
            (_distance(whole, clipped_sum(subject, loss_fn, rest, how)) for rest in _leave_one_out(few, records)),
            default=0.0,
        )
    except CliplessError as refused:
        problems.append(str(refused))
    problems += [
        f"buffer {name!r} changes during training: what it stores is not protected by noise." for name in changed
    ]
    if not problems and not error <= TOLERANCE:
        problems.append(
            f"the engine differs from the oracle by {error:.1e}: the model or the loss mixes records, or is not "
            "deterministic. Every record's loss must depend on that record alone."
        )
    if not problems and not change <= bound * (1 + TOLERANCE):
        problems.append(
            f"removing one record moves the clipped sum by {change:.4g}, more than the sensitivity {bound:.4g}: the model "
            "or the loss mixes records."
        )
    return CheckReport(_handling(model), records, error, change, bound, changed, tuple(problems))


def relative_error(one: ClippedSum, other: ClippedSum) -> float:
    """The largest relative difference of two clipped sums over the parameters."""
    scale = max((float(grad.norm()) for grad in other.grads.values()), default=0.0)
    errors = [
        float((grad - other.grads[name]).norm()) / max(float(other.grads[name].norm()), 1e-3 * scale, 1e-12)
        for name, grad in one.grads.items()
    ]
    return max(errors, default=0.0)


def _distance(one: ClippedSum, other: ClippedSum) -> float:
    squares = [(grad.double() - other.grads[name].double()).square().sum() for name, grad in one.grads.items()]
    return float(torch.stack(squares).sum().sqrt())


def _handling(model: nn.Module) -> tuple[Handling, ...]:
    found: dict[str, Handling] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for module in model.modules():
        rule = rule_of(module) or generic
        for parameter in module.parameters(recurse=False):
            name = names[id(parameter)]
            how = rule.__name__.replace("_", " ") if parameter.requires_grad else "frozen"
            found.setdefault(name, Handling(name, tuple(parameter.shape), how))
    return tuple(found.values())


def _changed_buffers(model: nn.Module, loss_fn: LossFunction, batch: Any) -> tuple[str, ...]:
    """Names of floating-point buffers that a forward pass in the model's present mode changes, tried on a copy."""
    subject = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in subject.named_buffers()}
    with torch.no_grad(), random_state_kept(model):
        loss_fn(subject, batch)
    now = dict(subject.named_buffers())
    return tuple(
        name
        for name, value in before.items()
        if value.is_floating_point() and not (name in now and torch.equal(now[name], value))
    )


def _without_dropout(model: nn.Module) -> nn.Module:
    subject = copy.deepcopy(model)
    for module in subject.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return subject


def _first(batch: Any, records: int) -> Any:
    return _rows(batch, records, torch.arange(min(records, MOST_RECORDS)))


def _leave_one_out(batch: Any, records: int) -> Iterator[Any]:
    for b in range(records):
        yield _rows(batch, records, torch.tensor([row for row in range(records) if row != b], dtype=torch.int64))


def _rows(batch: Any, records: int, rows: Tensor) -> Any:
    def take(leaf: Any) -> Any:
        per_record = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == records
        return leaf[rows.to(leaf.device)] if per_record else leaf

    return pytree.tree_map(take, batch)
