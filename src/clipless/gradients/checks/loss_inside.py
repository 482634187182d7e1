"""A module that returns the loss of the whole batch: is that the mean, or the sum, of one loss for each record?

Nothing of the single losses can be seen then, but a mean of several records is the mean of what the module returns for each
of them. That is tried on a few records, at the given weights and at others, where no two records have the same loss by
chance; in evaluation mode, and with constants in the place of random numbers that are drawn even then.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from clipless.errors import CliplessError, Misuse
from clipless.gradients.checks.constant_draws import constant_draws
from clipless.gradients.checks.messages import unstable
from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.checks.seeds import shuffled
from clipless.gradients.checks.totals import HALF_TOLERANCE, at_places, in_half_precision
from clipless.gradients.checks.weights import weights_moved, weights_shaken
from clipless.gradients.records import TROUBLES, selected

# So many records at most, and so many sets of weights besides the given ones.
FEW, SHAKEN = 8, 2
# How far a sum may be from its parts, relative to their sizes; more if rounding errors of the weights move it by so many
# times less.
TOLERANCE, EXPLAINED = 1e-5, 10.0


def refuse_coupled(forward_pass: ForwardPass, averaged: bool) -> None:
    """Raise if a module that returns the loss of the whole batch returns no mean, or no sum, of one loss per record."""
    if not forward_pass.loss_inside or forward_pass.records < 2:
        return
    order = shuffled(forward_pass.records, forward_pass.records)[:FEW]
    told = False
    with torch.no_grad():
        for number in range(SHAKEN + 1):
            with _weights(forward_pass, number):
                told |= _adds_up(forward_pass, order, averaged)
    if not told:
        raise unstable(forward_pass.name)


@contextmanager
def _weights(forward_pass: ForwardPass, number: int) -> Iterator[None]:
    assert forward_pass.rerun is not None
    with weights_shaken(forward_pass.rerun.module, number) if number else nullcontext():
        yield


def _adds_up(forward_pass: ForwardPass, order: Tensor, averaged: bool) -> bool:
    """Raise if the loss of a few records is not made of theirs. Returns whether it can be told: not if it is not finite."""
    try:
        parts = [_loss(forward_pass, row) for row in order.split(1)]
    except TROUBLES:
        parts = [_loss(forward_pass, rows) * (len(rows) if averaged else 1) for rows in order.chunk(2)]
    return _compared(forward_pass, order, parts, averaged)


def _compared(forward_pass: ForwardPass, order: Tensor, parts: list[float], averaged: bool) -> bool:
    times = len(order) if averaged else 1
    whole = _loss(forward_pass, order) * times
    apart, size = abs(whole - sum(parts)), abs(whole) + sum(map(abs, parts))
    if not math.isfinite(whole):
        return False
    if not math.isfinite(size):
        raise _coupled(forward_pass, averaged)  # a mean would have left out none of the records
    if apart > (HALF_TOLERANCE if in_half_precision(forward_pass) else TOLERANCE) * size:
        assert forward_pass.rerun is not None
        with weights_moved(forward_pass.rerun.module):
            rounding = abs(_loss(forward_pass, order) * times - whole)
        if apart > EXPLAINED * rounding:
            raise _coupled(forward_pass, averaged)
    return True


def _loss(forward_pass: ForwardPass, rows: Tensor) -> float:
    """What was differentiated of the outputs, for these records."""
    rerun, grads = forward_pass.rerun, forward_pass.grads or ()
    assert rerun is not None

    def calmly(*args: Any, **kwargs: Any) -> Any:
        with constant_draws():
            return rerun.module(*args, **kwargs)

    inputs = selected(rerun.inputs, forward_pass.reading, rows)
    output, _ = rerun(inputs, evaluate=True, run=calmly)
    pairs = zip(at_places(forward_pass, output), grads, strict=False)
    return sum(float(value) * float(grad) for value, grad in pairs if grad is not None)


def _coupled(forward_pass: ForwardPass, averaged: bool) -> CliplessError:
    return Misuse(
        f"the loss that {forward_pass.name!r} returns is not the {'mean' if averaged else 'sum'} of one loss per record, as "
        "loss_reduction says: a mean over all tokens, or with class weights, divides by what others have, and an auxiliary "
        "loss is one of the whole batch. Compute one loss per record from the model's output, and call "
        "private.step(record_losses, batch) or private.backward(losses)."
    )
