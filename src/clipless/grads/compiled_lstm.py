"""The LSTM cell by compiled code: one position in two passes instead of seventeen, for float32 in main memory."""

import functools
from pathlib import Path

import torch
from torch import Tensor

from clipless.compiled import COUNT, LIBRARY, POINTER, function, threads
from clipless.grads.cells import CELLS, Cell, Moment, Slopes, Weights

_ARGUMENTS = (*[POINTER] * 5, COUNT, COUNT, COUNT)


def suited(cell: Cell, x: Tensor) -> Cell:
    """The cell itself, or the compiled form of it where there is one for such tensors."""
    fast = compiled() if cell is CELLS["lstm"] and x.dtype == torch.float32 and x.device.type == "cpu" else None
    return fast or cell


@functools.cache
def compiled(library: Path = LIBRARY) -> Cell | None:
    """The compiled cell, if there is a library and it does what torch does."""
    step, back = (function(f"clipless_lstm_{way}", *_ARGUMENTS, library=library) for way in ("step", "back"))
    if step is None or back is None:
        return None

    def forward(weights: Weights, at: Moment) -> None:
        """`extra` is tanh of the new cell state."""
        assert at.c is not None
        at.gates.addmm_(at.h, weights.hh.t())
        step(*_places(at.gates, at.c, at.new_c, at.extra, at.new_h), *at.c.shape, threads(at.gates.nbytes))

    def backward(at: Moment, slopes: Slopes) -> None:
        assert at.c is not None
        back(*_places(at.gates, at.c, at.extra, slopes.h, slopes.c), *at.c.shape, threads(at.gates.nbytes))

    cell = Cell(forward, backward, extra=True, cell_state=True)
    return cell if _agree(cell, CELLS["lstm"]) else None


def _places(*tensors: Tensor | None) -> list[int]:
    """Where tensors without gaps lie in memory."""
    places = []
    for tensor in tensors:
        assert tensor is not None
        assert tensor.is_contiguous()
        places.append(tensor.data_ptr())
    return places


def _agree(one: Cell, other: Cell) -> bool:
    """Whether two cells do the same, on numbers of every size and on those that are none."""
    found = []
    for cell in (one, other):
        sums = torch.linspace(-30, 30, 4 * 64).sin_().mul_(30).view(2, 128)
        sums[1, ::9] = torch.tensor([torch.inf, -torch.inf, 1e-30] * 5)
        weights = cell.prepared(Weights(torch.eye(128), torch.zeros(128, 32), None, None, None))
        state = [torch.linspace(-2, 2, 64).view(2, 32).clone() for _ in range(6)]
        at = Moment(sums @ weights.ih, state[0], state[1], state[2], state[3], state[4])
        cell.step(weights, at)
        after = [at.new_h.clone(), state[4].clone(), state[0].clone()]
        of_h, of_c = torch.linspace(-1, 1, 64).view(2, 32), state[5]
        cell.back(at, Slopes(at.gates, of_h, of_c))
        found.append([*after, at.gates, of_c])
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in zip(*found, strict=True))
