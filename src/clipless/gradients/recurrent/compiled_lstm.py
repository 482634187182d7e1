"""The compiled LSTM: all time steps of a layer in one call, for float32 on the CPU."""

from collections.abc import Iterator

import torch
from torch import Tensor

from clipless.gradients.recurrent.cells import CELLS, Cell, Weights
from clipless.gradients.recurrent.through_time import Trace, back_by_steps, forward_by_steps
from clipless.native import checked, wave
from clipless.native.lstm import Passes, build

# Larger weights do not stay in the cache. With fewer records than MANY they are read more often than by torch's products.
IN_CACHE, MANY = 2**20, 32


def suited(cell: Cell, weights: Weights, x: Tensor) -> Passes | None:
    """The compiled passes, if there are any for such a layer on x [t,b,i]."""
    fits = cell is CELLS["lstm"] and weights.hr is None and x.dtype == torch.float32 and x.device.type == "cpu"
    few = weights.hh.nbytes > IN_CACHE and x.shape[1] < MANY
    return compiled() if fits and not few else None


def _pairs(ours: Passes) -> Iterator[tuple[Tensor, Tensor]]:
    """For sums of every magnitude and infinite ones; for sizes that fill no tile, more records than go together, records
    that end, both directions, and states that are asked for or not."""
    for shape, sizes, reverse in (
        ((2, 1, 12), [1, 1], False),
        ((3, 70, 72), [70, 66, 3], False),
        ((3, 9, 8), [9, 4, 1], True),
    ):
        t, b, width = shape
        for to_state, grad in ((True, wave(b, t, width).transpose(0, 1)), (False, None)):
            found = [_both_ways(passes, shape, sizes, reverse, grad, to_state) for passes in (ours, None)]
            yield from zip(*found, strict=True)


def _both_ways(
    passes: Passes | None,
    shape: tuple[int, int, int],
    sizes: list[int],
    reverse: bool,
    grad: Tensor | None,
    to_state: bool,
) -> list[Tensor]:
    """The results of a layer on [t,b,o], forward and back, by the passes or by torch's operations."""
    t, b, width = shape
    cell = CELLS["lstm"]
    weights = Weights(torch.eye(4 * width), wave(4 * width, width).div_(width), None, None, None)
    prepared = weights if passes else cell.prepared(weights)
    sums = wave(t, b, 4 * width).mul_(30)
    sums[0, 0, ::12], sums[0, 0, 1::12], sums[0, 0, 2::12] = torch.inf, -torch.inf, 1e-30
    hidden, cells = wave(t + 1, b, width), wave(t + 1, b, width).neg_()
    of_states = wave(b, width), wave(b, width).neg_()
    gates, tanh_c = sums * prepared.ih.diagonal(), torch.zeros(t, b, width)
    trace = Trace(cell, weights, sums, gates, hidden, cells, tanh_c, None, reverse)
    if passes is None:
        forward_by_steps(trace, prepared, sizes)
    else:
        passes.forward(trace.saved_steps(sizes), weights.hh)
    forward = [hidden.clone(), cells.clone()]
    if passes is None:
        back_by_steps(trace, grad, of_states, sizes, to_state)
    else:
        passes.back(trace.saved_steps(sizes), weights.hh, grad, of_states, to_state)
    return [*forward, gates, *of_states[not to_state :]]


compiled = checked(build, _pairs, rtol=1e-4, atol=1e-6)
