"""A pass through the outermost module, run again. Is any gradient lost: are the engine's sums those of plain autograd? And
does any record's output change when other records do: by a statistic of the batch that has no gradient, for instance?"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipless.errors import UnsupportedModule
from clipless.gradients.checks.messages import depends_on_others, lost_gradient, unstable
from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.checks.plain import plain_gradients
from clipless.gradients.checks.seeds import rows_of, sketch, some_of
from clipless.gradients.checks.weights import weights_moved
from clipless.gradients.records import TROUBLES, selected
from clipless.gradients.trees import differentiable
from clipless.random_state import same_random_state

# Relative to the larger of both sums; what the parameter adds to the whole gradient below the floor is rounding. Sums that
# went through 16 bits keep three digits.
TOLERANCE, HALF_TOLERANCE, FLOOR, HALF_FLOOR = 1e-3, 5e-2, 1e-5, 1e-3
# A batch of another size is rounded otherwise, and a unit at the edge of a ReLU makes a jump of it. What differs by less
# than this is compared once more with as many rows as there were; a gradient that depends on their number differs by more.
NEARLY = 5e-2
# Outputs that differ by more were not computed from the same numbers; below it, gradients may differ by so many times more.
REPEATED, AMPLIFIED = 5e-2, 100.0
# Outputs of one record that differ by more, relative, when others change.
DEPENDENT = 1e-3
# So many shares of a sum are looked at, at most, to see how far they are rounded.
SHARES = 16


def refuse_lost(
    forward_pass: ForwardPass, parameters: Mapping[str, nn.Parameter], live: Mapping[str, nn.Parameter]
) -> None:
    """Run a checked pass again, plainly, and refuse the first parameter whose sum over the judged records is not the
    engine's; before that, records whose outputs depend on others. The pass keeps no gradients after that.

    `live` are the objects that the model holds for the parameters now: others while sharded ones are gathered.
    """
    some = forward_pass.judged
    if some is None and forward_pass.records > 1:
        some = some_of(forward_pass.records, 1)
    if some is not None:
        with torch.no_grad():
            _run_some(forward_pass, ~some)
    gathered = None if live is parameters else live
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    with torch.enable_grad():
        found = None if some is None else _run_some(forward_pass, some)
        alone = found if forward_pass.judged is not None else None
        lost = _lost(forward_pass, alone or _run_again(forward_pass), trained, gathered)
        if lost and some is not None and alone and gathered is None and max(lost.values()) <= NEARLY:
            in_place = _run_some(forward_pass, some, in_place=True)
            lost = lost if in_place is None else _lost(forward_pass, in_place, trained, gathered)
        names = list(lost)
        if names and gathered is None and in_half_precision(forward_pass):
            names = beyond_rounding(names, forward_pass.totals, _shares(forward_pass, trained))
    forward_pass.grads = None
    for name in names:
        raise lost_gradient(name)


Again = tuple[list[Tensor], list[Tensor | None], float]


def _lost(
    forward_pass: ForwardPass,
    again: Again,
    parameters: Mapping[str, nn.Parameter],
    gathered: Mapping[str, nn.Parameter] | None,
) -> dict[str, float]:
    """How far plain autograd's gradients are from the engine's sums, relative, for the parameters where it is too far."""
    outputs, grads, drift = again
    plain = plain_gradients(outputs, grads, parameters, gathered)
    half = any(output.dtype.itemsize < 4 for output in outputs) or in_half_precision(forward_pass)
    del again, outputs, grads
    return differing(forward_pass.totals, plain, parameters, half, drift)


def differing(
    totals: Mapping[str, Tensor], plain: dict[str, Tensor], names: Iterable[str], half: bool, drift: float
) -> dict[str, float]:
    """How far plain autograd's gradients are from the engine's sums, relative, for the parameters where it is too far;
    `drift` is how far what they were computed from is."""
    tolerance = max(HALF_TOLERANCE if half else TOLERANCE, AMPLIFIED * drift)
    lengths = {name: _length(grad) for name, grad in plain.items()}
    everything = math.hypot(*lengths.values())
    lost: dict[str, float] = {}
    for name in names if math.isfinite(everything) else ():
        ours, theirs = totals.get(name), plain.pop(name, None)
        apart = _length(ours if theirs is None else theirs if ours is None else theirs.to(ours.dtype) - ours)
        size = max(_length(ours), lengths.get(name, 0.0))
        if apart > tolerance * size + (HALF_FLOOR if half else FLOOR) * everything:
            lost[name] = apart / size
    return lost


def beyond_rounding(
    names: Sequence[str], totals: Mapping[str, Tensor], shares: Iterable[Mapping[str, Tensor]]
) -> list[str]:
    """Of parameters whose sums differ, those where rounding to 16 bits does not explain it: each of the `shares` of the
    plain sum is rounded, and their sum may be much smaller than they are."""
    rest: dict[str, Tensor] = {name: totals[name].double() for name in names if name in totals}
    squares = dict.fromkeys(rest, 0.0)
    for share in shares:
        for name in rest.keys() & share.keys():
            rest[name] = rest[name] - share[name]
            squares[name] += _length(share[name]) ** 2
    rounded = {name for name in rest if _length(rest[name]) <= HALF_TOLERANCE * math.sqrt(squares[name])}
    return [name for name in names if name not in rounded]


def groups_of(numbers: Tensor) -> tuple[Tensor, ...]:
    """Records in a few groups, whose shares of a sum are looked at."""
    return numbers.chunk(SHARES)


def _shares(forward_pass: ForwardPass, parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """The shares of a few groups of the judged records in the plain gradients."""
    outputs, _, _ = _run_again(forward_pass)
    judged = forward_pass.judged
    numbers = torch.arange(forward_pass.records) if judged is None else judged.nonzero()[:, 0].cpu()
    for chosen in groups_of(numbers) if None not in forward_pass.out_dims else ():
        mask = torch.zeros(forward_pass.records, dtype=torch.bool).index_fill(0, chosen, True)
        grads = _arrived(forward_pass, partial(_masked, judged=mask))
        yield plain_gradients(outputs, grads, parameters, None)


def _run_again(forward_pass: ForwardPass) -> Again:
    """The outputs of the whole pass once more, the gradients of the judged records, and how far the outputs are from those
    of the first time, relative; refused if they are others."""
    assert forward_pass.rerun is not None
    outputs = at_places(forward_pass, forward_pass.rerun()[0])
    drift = _drift(forward_pass, outputs)
    return outputs, _arrived(forward_pass, lambda grad, dim: _masked(grad, dim, forward_pass.judged)), drift


def refuse_dependent(forward_pass: ForwardPass, tolerance: float) -> None:
    """Run a pass again on each half of its records alone, and refuse it if the outputs are others."""
    if forward_pass.records > 1:
        some = some_of(forward_pass.records, 1)
        with torch.no_grad():
            for half in (some, ~some):
                _run_some(forward_pass, half, tolerance)


def _run_some(
    forward_pass: ForwardPass, some: Tensor, tolerance: float = DEPENDENT, in_place: bool = False
) -> Again | None:
    """The outputs of some records, [b], without the others; where random numbers are drawn, with other records in the
    others' places, so that the same numbers meet the same rows; `in_place`, with these records in the others' places.

    Also the gradients that arrived at these outputs, and how far the outputs are from what they were, relative. Refused if
    that is more than `tolerance`, or than 16 bits explain.

    None if nothing can be told: the model draws another number of random numbers, depending on the records, or does not
    take these records together.
    """
    rerun, before = forward_pass.rerun, forward_pass.drawn
    assert rerun is not None
    assert before is not None
    rows = torch.arange(forward_pass.records)
    draws = in_place or bool(rerun.generators) or not same_random_state(before, rerun.random_state)
    filling = rows[some][rows % int(some.sum())] if in_place else rows.roll(1)
    taken = torch.where(some, rows, filling) if draws else rows[some]
    try:
        output, drawn = rerun(selected(rerun.inputs, forward_pass.reading, taken))
    except TROUBLES:
        return None
    outputs = at_places(forward_pass, output)
    if not same_random_state(before, drawn) or len(outputs) != len(forward_pass.values):
        return None
    drift = 0.0
    for value, dim, now in zip(forward_pass.values, forward_pass.out_dims, outputs, strict=True):
        if dim is not None:
            found = sketch(now, dim)
            found = found[:, some.to(found.device)] if draws and found.shape == value.shape else found
            expected = value[:, some.to(value.device)]
            if found.shape != expected.shape:
                return None
            drift = max(drift, _change(expected, found))
    if drift > (HALF_TOLERANCE if in_half_precision(forward_pass) else tolerance):
        _drift(forward_pass, at_places(forward_pass, rerun()[0]))
        explained = _shaken(forward_pass) > drift / 10
        raise (unstable if explained else depends_on_others)(forward_pass.name)

    def kept(grad: Tensor, dim: int) -> Tensor:
        return _masked(grad, dim, some) if draws else grad.index_select(dim, taken.to(grad.device))

    return outputs, _arrived(forward_pass, kept) if torch.is_grad_enabled() else [], drift


def _shaken(forward_pass: ForwardPass) -> float:
    """How far the outputs move, relative, when every weight moves by its rounding error; zero if that cannot be told."""
    assert forward_pass.rerun is not None
    rerun = forward_pass.rerun
    try:
        with weights_moved(rerun.module):
            output, _ = rerun()
        found = _sketches(forward_pass, at_places(forward_pass, output))
        return max(_change(v, o) for v, o in zip(forward_pass.values, found, strict=True))
    except TROUBLES:
        return 0.0


def _change(before: Tensor, now: Tensor) -> float:
    """The largest change of a record's outputs in a sketch."""
    return change(rows_of(before), rows_of(now))


def change(before: Tensor, now: Tensor) -> float:
    """The largest change of a record's numbers, [b] or [b,n], relative to their length; records that were not finite tell
    nothing."""
    ours, theirs = (value.double().view(len(value), -1) for value in (before, now))
    told = ours.isfinite().all(1)
    if not bool(told.any()):
        return 0.0
    size = ours.norm(dim=1) + 1e-3 * ours[told].norm()
    return float(((ours - theirs).norm(dim=1) / size.clamp(min=1e-300))[told].nan_to_num(nan=torch.inf).max())


def _arrived(forward_pass: ForwardPass, kept: Callable[[Tensor, int], Tensor]) -> list[Tensor | None]:
    """Of each gradient that arrived at the outputs, what is kept."""
    pairs = zip(forward_pass.grads or (), forward_pass.out_dims, strict=True)
    return [grad if grad is None or dim is None else kept(grad, dim) for grad, dim in pairs]


def _masked(grad: Tensor, dim: int, judged: Tensor | None) -> Tensor:
    if judged is None:
        return grad
    mask = judged.to(grad.device).view([-1 if k == dim else 1 for k in range(grad.dim())])
    return torch.where(mask, grad, 0.0)


def in_half_precision(forward_pass: ForwardPass) -> bool:
    """Whether it computes, or may compute, with 16 bits."""
    assert forward_pass.rerun is not None
    return forward_pass.rerun.autocast[1] or any(p.dtype.itemsize < 4 for p in forward_pass.rerun.module.parameters())


def at_places(forward_pass: ForwardPass, output: Any) -> list[Tensor]:
    everything = differentiable(output)
    return [everything[k] for k in forward_pass.places if k < len(everything)]


def _sketches(forward_pass: ForwardPass, outputs: list[Tensor]) -> list[Tensor]:
    return [sketch(output, dim or 0) for output, dim in zip(outputs, forward_pass.out_dims, strict=False)]


def _alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return [value.shape for value in one] == [value.shape for value in other]


def _drift(forward_pass: ForwardPass, outputs: list[Tensor]) -> float:
    """How far the outputs are from those of the first pass, relative; refused if they are others."""
    now = _sketches(forward_pass, outputs)
    alike = _alike(forward_pass.values, now)
    pairs = [(v.double(), o.double()) for v, o in zip(forward_pass.values, now, strict=False) if alike]
    pairs = [(value, output) for value, output in pairs if bool(value.isfinite().all() & output.isfinite().all())]
    drift = max((float((v - o).norm() / v.norm().clamp(min=1e-30)) for v, o in pairs), default=0.0)
    if not alike or drift > REPEATED:
        raise UnsupportedModule(
            f"{forward_pass.name!r} run twice on the same records, with the same random numbers, gave two different "
            "outputs: it keeps something of the records from one pass to the next (a moving average, a cache), which "
            "no noise protects, or draws from a generator of its own. Keep nothing in forward, and draw from torch's "
            "generator."
        )
    return drift


def _length(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
