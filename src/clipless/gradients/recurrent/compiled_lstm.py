"""The compiled LSTM cell, for float32 on the CPU: two passes through memory for a time step instead of seventeen."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clipless.gradients.matrix_products import add_or_leave
from clipless.gradients.recurrent.cells import CELLS, Cell, StepGradients, TimeStep, Weights
from clipless.native import checked, lstm


def suited(cell: Cell, x: Tensor) -> Cell:
    """The compiled form of the cell, if there is one for such tensors, or the cell itself."""
    fast = compiled() if cell is CELLS["lstm"] and x.dtype == torch.float32 and x.device.type == "cpu" else None
    return fast or cell


def _build(library: Path) -> Cell | None:
    passes = lstm.build(library)
    if passes is None or not _adds_what_is_apart(passes):
        return None

    def forward(weights: Weights, at: TimeStep) -> None:
        """`extra` is tanh of the new cell state."""
        assert at.c is not None
        assert at.new_c is not None
        assert at.extra is not None
        apart = add_or_leave(at.gates, at.h, weights.hh.t())
        passes.step(at.gates, apart, at.c, at.new_c, at.extra, at.new_h)

    def backward(at: TimeStep, grads_at: StepGradients) -> None:
        assert at.c is not None
        assert at.extra is not None
        assert grads_at.c is not None
        passes.back(at.gates, at.c, at.extra, grads_at.h, grads_at.c)

    return Cell(forward, backward, extra=True, cell_state=True)


def _adds_what_is_apart(passes: lstm.Passes) -> bool:
    """Whether sums that are given in two parts are the sums."""
    whole, part, c = (
        torch.linspace(-3, 3, 2 * 48).view(2, 48),
        torch.linspace(2, -1, 2 * 48).view(2, 48),
        torch.ones(2, 12),
    )
    found = []
    for gates, apart in ((whole + part, None), (whole.clone(), part)):
        states = [torch.zeros(2, 12) for _ in range(3)]
        passes.step(gates, apart, c, *states)
        found.append([gates, *states])
    return all(np.array_equal(one.numpy(), other.numpy()) for one, other in zip(*found, strict=True))


def _pairs(ours: Cell) -> Iterator[tuple[Tensor, Tensor]]:
    """For numbers of every magnitude, infinities and NaN."""
    return zip(_passed(ours), _passed(CELLS["lstm"]), strict=True)


def _passed(cell: Cell) -> list[Tensor]:
    """The results of a cell at one time step, forward and backward."""
    sums = torch.linspace(-30, 30, 4 * 64).sin_().mul_(30).view(2, 128)
    sums[1, ::9] = torch.tensor([torch.inf, -torch.inf, 1e-30] * 5)
    weights = cell.prepared(Weights(torch.eye(128), torch.zeros(128, 32), None, None, None))
    state = [torch.linspace(-2, 2, 64).view(2, 32).clone() for _ in range(6)]
    at = TimeStep(sums @ weights.ih, state[0], state[1], state[2], state[3], state[4])
    cell.step(weights, at)
    after = [at.new_h.clone(), state[4].clone(), state[0].clone()]
    of_h, of_c = torch.linspace(-1, 1, 64).view(2, 32), state[5]
    cell.back(at, StepGradients(at.gates, of_h, of_c))
    return [*after, at.gates, of_c]


compiled = checked(_build, _pairs, rtol=1e-4, atol=1e-6)
