"""check: the engine against the oracle, one record removed at a time, and buffers that training would change."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.utils import _pytree as pytree

from clipless import oracle
from clipless.clipping import Clipping, abadi, as_clipping
from clipless.errors import CliplessError, InvalidArgument, InvalidType, named
from clipless.grads.clipped_sum import ClippedSum, LossFunction, clipped_sum, count_records
from clipless.grads.layout import random_state_kept
from clipless.grads.rules import generic, rule_of
from clipless.grads.watch import watched_buffers
from clipless.partition import partition
from clipless.plan import sensitivity
from clipless.preflight.measuring import Cost, measure, rule_name
from clipless.preflight.report import HALF_TOLERANCE, TOLERANCE, CheckReport, Handling

MOST_RECORDS = 8


def check(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    clipping: str | Clipping = "auto-s",
    loss_reduction: str = "mean",
) -> CheckReport:
    """Run the engine against the oracle, remove each record in turn, and look for buffers that training would change.

    `loss_fn(model, batch)` is the loss that is trained: one loss per record, for `private.backward`, or a number for the
    whole batch, for `loss.backward()`, which is the mean or the sum of the records' losses as `loss_reduction` says: one
    that is not is found. The first few records of the batch are used. The model is left as it was.

    Randomness (dropout) is turned off for the comparison, which is made in float64 if the model can be run so and is not in
    half precision; time and memory are those of the model's own type. What is refused is a problem in the report, not an
    exception. Nothing in the report is private.

    >>> model = nn.Linear(2, 1)
    >>> report = check(model, lambda m, x: m(x)[:, 0], torch.randn(4, 2))
    >>> report.sound, [(row.parameter, row.how) for row in report.handling]
    (True, [('weight', 'linear'), ('bias', 'linear')])
    """
    how = as_clipping(clipping)
    loss_fn = _spread(loss_fn, named("loss_reduction", loss_reduction, {"mean": True, "sum": False}))
    groups = partition(how.groups, [name for name, p in model.named_parameters() if p.requires_grad])
    bound = float(sensitivity(how.start(len(groups))))
    found = _Found()
    with random_state_kept(model):
        found.changed = _changed_buffers(model, loss_fn, batch)
        try:
            _compare(found, _without_dropout(model), loss_fn, batch, how)
        except CliplessError as refused:
            found.refusal = str(refused)
    figures = (found.records, found.error, found.change, bound, found.changed)
    report = CheckReport(_handling(model, found.costs), *figures, (), found.tolerance)
    return CheckReport(report.handling, *figures, tuple(_problems(report, found.refusal)), found.tolerance)


def _spread(loss_fn: LossFunction, averaged: bool) -> LossFunction:
    """The loss function with a loss for the whole batch, as training takes it, spread evenly over the records: their sum
    has the gradient that training sees."""

    def losses(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            return loss
        rows = next((len(x) for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim() > 0), 1)
        return (loss if averaged else loss / max(rows, 1)).expand(rows)

    return losses


def refuse_unsound(model: nn.Module, loss_and_batch: object, clipping: str | Clipping, loss_reduction: str) -> None:
    """Raise `Unsound` unless the model keeps the promise on `(loss_fn, batch)`."""
    if not isinstance(loss_and_batch, tuple) or len(loss_and_batch) != 2 or not callable(loss_and_batch[0]):
        raise InvalidType(
            "check must be a pair (loss_fn, batch), where loss_fn(model, batch) returns the loss that is trained."
        )
    check(model, *loss_and_batch, clipping, loss_reduction).raise_if_unsound()


def relative_error(one: ClippedSum, other: ClippedSum) -> float:
    """The largest relative difference of two clipped sums over the parameters."""
    scale = max((float(grad.norm()) for grad in other.grads.values()), default=0.0)
    errors = [
        float((grad - other.grads[name]).norm()) / max(float(other.grads[name].norm()), 1e-3 * scale, 1e-12)
        for name, grad in one.grads.items()
    ]
    return max(errors, default=0.0)


@dataclass
class _Found:
    """Filled in as far as the check gets before something is refused."""

    records: int = 0
    error: float = float("nan")
    change: float = float("nan")
    costs: dict[str, Cost] | None = None
    changed: tuple[str, ...] = field(default_factory=tuple)
    refusal: str | None = None

    @property
    def tolerance(self) -> float:
        """Gradients that arrive in half precision carry its rounding."""
        return HALF_TOLERANCE if any(cost.half for cost in (self.costs or {}).values()) else TOLERANCE


def _compare(found: _Found, subject: nn.Module, loss_fn: LossFunction, batch: Any, how: Clipping) -> None:
    if not any(p.requires_grad for p in subject.parameters()):
        raise InvalidArgument("the model has no trainable parameter: set requires_grad_(True) on what should learn.")
    few = _first(batch, count_records(subject, loss_fn, batch))
    found.records = records = count_records(subject, loss_fn, few)
    if records < 2:
        raise InvalidArgument(
            f"{records} record{'s' * (records == 0)} cannot show whether records mix: check on a batch of two or more."
        )
    clipped_sum(subject, loss_fn, few, how)
    found.costs = measure(subject, loss_fn, few, records)
    if found.tolerance == TOLERANCE:
        try:
            found.error, found.change = _errors(*_in_float64(subject, few), loss_fn, how, records)
            return
        except Exception:
            pass  # not every model can be run in float64
    found.error, found.change = _errors(subject, few, loss_fn, how, records)


def _errors(model: nn.Module, few: Any, loss_fn: LossFunction, how: Clipping, records: int) -> tuple[float, float]:
    """How far the engine is from the oracle, clipped and not, since clipping can hide a difference on these records; and how
    far the clipped sum moves when one of them is removed."""
    whole = clipped_sum(model, loss_fn, few, how)
    error = relative_error(whole, oracle.clipped_sum(model, loss_fn, few, how))
    plain = relative_error(*(f(model, loss_fn, few, _UNCLIPPED) for f in (clipped_sum, oracle.clipped_sum)))
    rest = _leave_one_out(few, records)
    return max(error, plain), max(_distance(whole, clipped_sum(model, loss_fn, some, how)) for some in rest)


_UNCLIPPED = abadi(threshold=1e20)


def _in_float64(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Model and batch in float64, where records that do not mix do not seem to: in float32 the same gradient computed twice
    can differ by more than the tolerance if the model is ill-conditioned."""

    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return copy.deepcopy(model).double(), pytree.tree_map(wide, batch)


def _problems(report: CheckReport, refusal: str | None) -> Iterator[str]:
    if refusal is not None:
        yield refusal
    elif report.oracle_agreement is None:
        yield "the gradients are not finite numbers, so nothing could be compared: check the loss and the batch."
    for name in report.changed_buffers:
        yield f"buffer {name!r} changes during training: what it stores is not protected by noise."
    if report.oracle_agreement is False:
        yield (
            f"the engine differs from the oracle by {report.oracle_error:.1e}: the model or the loss mixes records, or is "
            "not deterministic. Every record's loss must depend on that record alone."
        )
    if report.remove_one_record is False:
        yield (
            f"removing one record moves the clipped sum by {report.largest_change:.4g}, more than the sensitivity "
            f"{report.sensitivity:.4g}: the model or the loss mixes records."
        )


def _distance(one: ClippedSum, other: ClippedSum) -> float:
    squares = [(grad.double() - other.grads[name].double()).square().sum() for name, grad in one.grads.items()]
    return float(torch.stack(squares).sum().sqrt())


def _handling(model: nn.Module, costs: dict[str, Cost] | None) -> tuple[Handling, ...]:
    """By what ran, if it came to that; else by what the registry says of the modules."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if costs is None:
        rules = _registered(model)
        return tuple(Handling(name, shapes[name], "frozen" if name in frozen else rules[name]) for name in shapes)
    seconds = sum(cost.seconds for cost in costs.values()) or 1.0
    held = sum(cost.bytes for cost in costs.values()) or 1
    rows = []
    for name, shape in shapes.items():
        cost = costs.get(name, Cost())
        how = "frozen" if name in frozen else " + ".join(cost.rules) or "unused"
        rows.append(Handling(name, shape, how, cost.seconds / seconds, cost.bytes / held))
    return tuple(rows)


def _registered(model: nn.Module) -> dict[str, str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rules: dict[str, dict[str, None]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            rules.setdefault(names[id(parameter)], {}).setdefault(rule_name(rule_of(module) or generic))
    return {name: " + ".join(found) for name, found in rules.items()}


def _changed_buffers(model: nn.Module, loss_fn: LossFunction, batch: Any) -> tuple[str, ...]:
    """Names of buffers that a forward pass in the model's present mode changes, tried on a copy."""
    subject = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in watched_buffers(subject.named_modules()).items()}
    with torch.no_grad():
        loss_fn(subject, batch)
    now = watched_buffers(subject.named_modules())
    return tuple(name for name, value in before.items() if not (name in now and torch.equal(now[name], value)))


def _without_dropout(model: nn.Module) -> nn.Module:
    """A copy in which dropout layers, and the rates that other modules keep for functional dropout, are zero, and in
    which spectral norm does not go on with its power iteration from one pass to the next."""
    subject = copy.deepcopy(model)
    for module in subject.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, _SpectralNorm):
            module.eval()
        rates = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        vars(module).update(dict.fromkeys(rates, 0.0))
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
