"""A pass through the outermost module, run again. Is any gradient lost: are the engine's sums those of plain autograd? And
does any record's output change when other records do: by a statistic of the batch that has no gradient, for instance?"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipless.errors import CliplessError, Misuse, UnsupportedModule
from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.checks.records import gradients_set_aside, leaves_of
from clipless.gradients.checks.seeds import shuffled, sketch
from clipless.gradients.randomness import same_random_state
from clipless.gradients.records import TROUBLES, selected
from clipless.gradients.shards import own_rows
from clipless.gradients.trees import differentiable

# Relative to the larger of both sums; what the parameter adds to the whole gradient below the floor is rounding. Sums that
# went through 16 bits keep three digits.
TOLERANCE, HALF_TOLERANCE, FLOOR = 1e-3, 5e-2, 1e-5
# Outputs that differ by more were not computed from the same numbers; below it, gradients may differ by so many times more.
REPEATED, AMPLIFIED = 5e-2, 100.0
# Outputs of one record that differ by more, relative, when others change.
DEPENDENT = 1e-3


def refuse_lost(
    forward_pass: ForwardPass, parameters: Mapping[str, nn.Parameter], live: Mapping[str, nn.Parameter]
) -> None:
    """Run a checked pass again, plainly, and refuse the first parameter whose sum is not the engine's. `live` are those
    in place of the parameters while these are not sharded."""
    assert forward_pass.rerun is not None
    assert forward_pass.grads is not None
    with torch.enable_grad():
        outputs = _at_places(forward_pass, forward_pass.rerun()[0])
    drift = _drift(forward_pass, outputs)
    parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    plain = _gradients(outputs, forward_pass.grads, parameters, live)
    half = any(output.dtype.itemsize < 4 for output in outputs) or _half(forward_pass)
    del outputs
    tolerance = max(HALF_TOLERANCE if half else TOLERANCE, AMPLIFIED * drift)
    lengths = {name: _length(grad) for name, grad in plain.items()}
    everything = math.hypot(*lengths.values())
    if not math.isfinite(everything):
        return
    for name in parameters:
        ours, theirs = forward_pass.totals.get(name), plain.pop(name, None)
        apart = _length(ours if theirs is None else theirs if ours is None else theirs.to(ours.dtype) - ours)
        if apart > tolerance * max(_length(ours), lengths.get(name, 0.0)) + FLOOR * everything:
            raise lost(name)


def refuse_dependent(forward_pass: ForwardPass) -> None:
    """Run a checked pass again with other records in half of the rows, and refuse it if the outputs of the rest are others.

    As many rows go in as before, so that the same random numbers meet the same rows. If the model draws another number of
    them, depending on the records, or does not take these records together, nothing can be told.
    """
    assert forward_pass.rerun is not None
    if forward_pass.records < 2:
        return
    rows = torch.arange(forward_pass.records)
    stays = shuffled(forward_pass.records, forward_pass.records) < forward_pass.records // 2
    taken = selected(forward_pass.rerun.inputs, forward_pass.reading, torch.where(stays, rows, rows.roll(1)))
    try:
        with torch.no_grad():
            output, drawn = forward_pass.rerun(taken)
    except TROUBLES:
        return
    others = _sketches(forward_pass, _at_places(forward_pass, output))
    if (
        forward_pass.drawn is None
        or not same_random_state(forward_pass.drawn, drawn)
        or not _alike(forward_pass.values, others)
    ):
        return
    tolerance = HALF_TOLERANCE if _half(forward_pass) else DEPENDENT
    for one, other, dim in zip(forward_pass.values, others, forward_pass.out_dims, strict=True):
        if dim is None:
            continue
        ours, theirs = (value[stays.to(value.device)].flatten(1).double() for value in (one, other))
        told = ours.isfinite().all(1)
        same = (ours - theirs).norm(dim=1) <= tolerance * (ours.norm(dim=1) + 1e-3 * ours[told].norm())
        if bool((told & ~same).any()):
            raise UnsupportedModule(
                f"the output of {forward_pass.name!r} for one record depends on the other records of the batch (a "
                "statistic over the batch, a choice made for all of them), so no bound per record exists. Compute "
                "every record's output from that record alone; scale inputs by fixed constants."
            )


def refuse_coupled(forward_pass: ForwardPass, averaged: bool) -> None:
    """A module that returns the loss of the whole batch: refused unless the losses of two halves add up to it."""
    assert forward_pass.rerun is not None
    if not forward_pass.loss_inside or forward_pass.records < 2:
        return
    order = shuffled(forward_pass.records, forward_pass.records)
    weighted = []
    with torch.no_grad():
        for rows in (order, *order.chunk(2)):
            output, _ = forward_pass.rerun(
                selected(forward_pass.rerun.inputs, forward_pass.reading, rows), evaluate=True
            )
            (loss,) = _at_places(forward_pass, output)[: len(forward_pass.places)][:1] or [torch.zeros(())]
            weighted.append(float(loss) * (len(rows) if averaged else 1))
    whole, *halves = weighted
    if not abs(whole - sum(halves)) <= (HALF_TOLERANCE if _half(forward_pass) else TOLERANCE) * sum(map(abs, halves)):
        raise Misuse(
            f"the loss that {forward_pass.name!r} returns is not the {'mean' if averaged else 'sum'} of one loss per "
            "record, as loss_reduction says: a mean over all tokens, or with class weights, divides by what others "
            "have. Compute one loss per record from the model's output, and call private.backward(losses)."
        )


def _half(forward_pass: ForwardPass) -> bool:
    """Whether it computes, or may compute, with 16 bits."""
    assert forward_pass.rerun is not None
    return forward_pass.rerun.autocast[1] or any(p.dtype.itemsize < 4 for p in forward_pass.rerun.module.parameters())


def _at_places(forward_pass: ForwardPass, output: Any) -> list[Tensor]:
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


def _gradients(
    outputs: list[Tensor],
    grads: tuple[Tensor | None, ...],
    parameters: Mapping[str, nn.Parameter],
    live: Mapping[str, nn.Parameter],
) -> dict[str, Tensor]:
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
    if not pairs:
        return {}
    roots, arrived = [output for output, _ in pairs], [grad for _, grad in pairs]
    if any(hasattr(parameter, "device_mesh") for parameter in parameters.values()):
        return _own_rows_of_gradients(roots, arrived, parameters, live)
    try:
        found: Any = torch.autograd.grad(
            roots, list(parameters.values()), arrived, retain_graph=True, allow_unused=True
        )
    except RuntimeError as refused:
        if isinstance(refused, CliplessError) or "use_reentrant" not in str(refused):
            raise
        with gradients_set_aside([*leaves_of(roots), *parameters.values()]):
            torch.autograd.backward(roots, arrived)
            found = [parameter.grad for parameter in parameters.values()]
    return {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}


def _own_rows_of_gradients(
    roots: list[Tensor],
    arrived: list[Tensor],
    parameters: Mapping[str, nn.Parameter],
    live: Mapping[str, nn.Parameter],
) -> dict[str, Tensor]:
    """This process's rows of the gradients of sharded parameters, of which never more than one is there as a whole."""
    found: dict[str, Tensor] = {}

    def keep(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            rows = own_rows(parameter.grad, parameters[name])
            found[name] = found[name] + rows if name in found else rows.clone()
            parameter.grad = None

    handles = [live[name].register_post_accumulate_grad_hook(partial(keep, name)) for name in parameters]
    try:
        with gradients_set_aside(leaves_of(roots)):
            torch.autograd.backward(roots, arrived)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _length(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def lost(name: str) -> UnsupportedModule:
    return UnsupportedModule(
        f"the gradient of parameter {name!r} is not what plain autograd gives for it: the model uses it in a way that "
        "clipless does not see. Use it in the forward pass of the module that owns it, and return tensors, tuples, lists "
        "or dictionaries; clipless.check(model, loss_fn, batch) shows the difference."
    )
