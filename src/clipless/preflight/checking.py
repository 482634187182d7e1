"""check: compare the engine with the oracle, remove one record at a time, and look for buffers that training changes."""

import copy
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipless import defaults, oracle
from clipless.arguments import named
from clipless.clipped import ClippedSum, LossFunction
from clipless.clipping import Clipping, abadi, as_clipping
from clipless.errors import CliplessError, InvalidArgument, InvalidType, Misuse
from clipless.gradients.capture.watch import watched_buffers
from clipless.gradients.clipped_sum import count_records, engine_sum
from clipless.gradients.shards import refuse_sharded, sharded_parameter
from clipless.partition import partition
from clipless.plan import sensitivity
from clipless.preflight.handling import HandledBy, observe_rules, registered
from clipless.preflight.report import HALF_TOLERANCE, TOLERANCE, CheckReport, Handling
from clipless.random_state import random_state_kept
from clipless.torch_internals import AnyDropout, SpectralNorm, pytree

MOST_RECORDS = 8


def check(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    clipping: str | Clipping = defaults.CLIPPING,
    loss_reduction: str | None = None,
) -> CheckReport:
    """Compare the engine with the oracle, remove each record in turn, and look for buffers that training would change.

    `loss_fn(model, batch)` is the training loss: one loss per record, for `private.backward`, or one number for the batch,
    for `loss.backward()`. That number must be the mean or the sum of the records' losses, as `loss_reduction` says, which
    has no default; the check notices if it is not. Only the first few records of the batch are used. The model is left
    unchanged.

    The comparison runs without dropout, and in float64 unless the model cannot run in float64 or computes in half precision.
    What is refused becomes a problem in the report, not an exception. Nothing in the report is private.

    >>> model = nn.Linear(2, 1)
    >>> report = check(model, lambda m, x: m(x)[:, 0], torch.randn(4, 2))
    >>> report.sound, [(row.parameter, row.how) for row in report.handling]
    (True, [('weight', 'linear'), ('bias', 'linear')])
    """
    how = as_clipping(clipping)
    refuse_sharded(model)
    if loss_reduction is not None:
        named("loss_reduction", loss_reduction, dict.fromkeys(("mean", "sum")))
    loss_fn = _spread(loss_fn, loss_reduction)
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
    report = CheckReport(_handling(model, found.rules), *figures, (), found.tolerance)
    return CheckReport(report.handling, *figures, tuple(_problems(report, found.refusal)), found.tolerance)


def _spread(loss_fn: LossFunction, loss_reduction: str | None) -> LossFunction:
    """The loss function, with a loss of the whole batch spread evenly over the records, so that their sum has the gradient
    that training sees."""

    def losses(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            return loss
        if loss_reduction is None:
            raise InvalidArgument(
                "loss_fn returned one number for the batch: pass loss_reduction='mean' or 'sum' to say which it is, or "
                "return one loss per record."
            )
        rows = next((len(x) for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim() > 0), 1)
        return (loss if loss_reduction == "mean" else loss / max(rows, 1)).expand(rows)

    return losses


def refuse_unsound(
    model: nn.Module, loss_and_batch: object, clipping: str | Clipping, loss_reduction: str | None
) -> None:
    """Raise `Unsound` unless `check` on `(loss_fn, batch)` finds the model sound."""
    if not isinstance(loss_and_batch, tuple) or len(loss_and_batch) != 2 or not callable(loss_and_batch[0]):
        raise InvalidType(
            "check must be a pair (loss_fn, batch), where loss_fn(model, batch) returns the training loss."
        )
    if sharded_parameter(model) is not None:
        raise Misuse("check= runs the model in one process: call clipless.check(...) before fully_shard.")
    check(model, *loss_and_batch, clipping, loss_reduction).raise_if_unsound()


def relative_error(one: ClippedSum, other: ClippedSum) -> float:
    """The largest relative difference between two clipped sums, over the parameters."""
    scale = max((float(grad.norm()) for grad in other.grads.values()), default=0.0)
    errors = [
        float((grad - other.grads[name]).norm()) / max(float(other.grads[name].norm()), 1e-3 * scale, 1e-12)
        for name, grad in one.grads.items()
    ]
    return max(errors, default=0.0)


@dataclass
class _Found:
    """What the check has found so far; fields keep their defaults if the model is refused first."""

    records: int = 0
    error: float = float("nan")
    change: float = float("nan")
    rules: dict[str, HandledBy] | None = None
    changed: tuple[str, ...] = field(default_factory=tuple)
    refusal: str | None = None

    @property
    def tolerance(self) -> float:
        """Gradients that arrive in half precision carry its rounding."""
        return HALF_TOLERANCE if any(by.half for by in (self.rules or {}).values()) else TOLERANCE


def _compare(found: _Found, subject: nn.Module, loss_fn: LossFunction, batch: Any, how: Clipping) -> None:
    if not any(p.requires_grad for p in subject.parameters()):
        raise InvalidArgument("the model has no trainable parameter: set requires_grad_(True) on what should learn.")
    few = _first(batch, count_records(subject, loss_fn, batch))
    found.records = records = count_records(subject, loss_fn, few)
    if records < 2:
        raise InvalidArgument(
            f"{records} record{'s' * (records == 0)} cannot show whether records mix: check on a batch of two or more."
        )
    engine_sum(subject, loss_fn, few, how, checked=False)
    found.rules = observe_rules(subject, loss_fn, few, records)
    if found.tolerance == TOLERANCE:
        with suppress(Exception):  # not every model can be run in float64
            found.error, found.change = _errors(*_in_float64(subject, few), loss_fn, how, records)
    if math.isnan(found.error):
        found.error, found.change = _errors(subject, few, loss_fn, how, records)


def _errors(model: nn.Module, few: Any, loss_fn: LossFunction, how: Clipping, records: int) -> tuple[float, float]:
    """The difference between engine and oracle, with clipping and without, since clipping could hide one; and how far the
    clipped sum moves if a record is removed."""
    fast = partial(engine_sum, checked=False)
    whole = fast(model, loss_fn, few, how)
    error = relative_error(whole, oracle.clipped_sum(model, loss_fn, few, how))
    plain = relative_error(*(f(model, loss_fn, few, _UNCLIPPED) for f in (fast, oracle.clipped_sum)))
    rest = _leave_one_out(few, records)
    return max(error, plain), max(_distance(whole, fast(model, loss_fn, some, how)) for some in rest)


_UNCLIPPED = abadi(threshold=1e20)


def _in_float64(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Model and batch in float64. In float32 an ill-conditioned model can give gradients that differ by more than the
    tolerance although no records mix."""

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
            f"removing one record moves the clipped sum by more than the sensitivity, {report.sensitivity:.4g}: the model "
            "or the loss mixes records."
        )


def _distance(one: ClippedSum, other: ClippedSum) -> float:
    squares = [(grad.double() - other.grads[name].double()).square().sum() for name, grad in one.grads.items()]
    return float(torch.stack(squares).sum().sqrt())


def _handling(model: nn.Module, rules: dict[str, HandledBy] | None) -> tuple[Handling, ...]:
    """By the rules that ran, or by the registry if the model was refused before any ran."""
    expected = registered(model)
    rows = []
    for name, parameter in model.named_parameters():
        how = expected[name] if rules is None else " + ".join(rules[name].rules) if name in rules else "unused"
        rows.append(Handling(name, tuple(parameter.shape), how if parameter.requires_grad else "frozen"))
    return tuple(rows)


def _changed_buffers(model: nn.Module, loss_fn: LossFunction, batch: Any) -> tuple[str, ...]:
    """Names of the buffers that a forward pass changes in the model's current mode. Runs on a copy."""
    subject = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in watched_buffers(subject.named_modules()).items()}
    with torch.no_grad():
        loss_fn(subject, batch)
    now = watched_buffers(subject.named_modules())
    return tuple(name for name, value in before.items() if not (name in now and torch.equal(now[name], value)))


def _without_dropout(model: nn.Module) -> nn.Module:
    """A copy with every dropout rate at zero, those that modules keep for functional dropout included, and with the power
    iteration of spectral norm stopped."""
    subject = copy.deepcopy(model)
    for module in subject.modules():
        if isinstance(module, AnyDropout):
            module.p = 0.0
        if isinstance(module, SpectralNorm):
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
