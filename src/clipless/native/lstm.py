"""lstm.c: all time steps of an LSTM layer in one direction, forward and back, in one call each."""

from collections.abc import Callable, Sequence
from ctypes import Array, c_int64
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from clipless.native.library import COUNT, POINTER, function, threads
from clipless.native.tiles import PANEL, ROWS, whole


class SavedSteps(NamedTuple):
    """The saved tensors of a layer, float32 without gaps in main memory, and how many records there are at each position.
    In the reverse direction the state before a position lies behind it."""

    gates: Tensor  # [t,b,4o]
    hidden: Tensor  # [t+1,b,o]
    cells: Tensor  # [t+1,b,o]
    tanh_c: Tensor  # [t,b,o]
    sizes: Sequence[int]  # [t]
    reverse: bool


class Passes(NamedTuple):
    """Both passes, in place, with the hidden state's weights [4o,o]. Forward, `gates` holds the input's part of the sums and
    becomes the gates, and the initial states become those after every position. Back, from the gradients of the output
    [t,b,o], if there are any, and of the states after the layer, the gates become the gradients of their sums, and the
    gradients of the states [b,o] those of the states before it: that of h only on request."""

    forward: Callable[[SavedSteps, Tensor], None]
    back: Callable[[SavedSteps, Tensor, Tensor | None, Sequence[Tensor], bool], None]


def build(library: Path) -> Passes | None:
    run_forward = function(library, "clipless_lstm_forward", *[POINTER] * 8, COUNT)
    run_back = function(library, "clipless_lstm_back", *[POINTER] * 10, COUNT)
    if run_forward is None or run_back is None:
        return None

    def forward(steps: SavedSteps, weights: Tensor) -> None:
        numbers, sizes = _checked(steps, weights)
        panels = weights.new_empty(whole(4 * steps.cells.shape[2], PANEL) * steps.cells.shape[2])
        tensors = (steps.gates, weights, steps.hidden, steps.cells, steps.tanh_c, panels)
        run_forward(*_places(*tensors), numbers, sizes, _workers(steps))

    def back(
        steps: SavedSteps, weights: Tensor, grad: Tensor | None, of_states: Sequence[Tensor], to_state: bool
    ) -> None:
        t, b, width = steps.tanh_c.shape
        if any(part.shape != (b, width) or not part.is_contiguous() for part in of_states):
            raise ValueError("gradients of the states do not fit the layer.")
        if grad is not None:
            if grad.shape != (t, b, width):
                raise ValueError("the output's gradient does not fit the layer.")
            grad = grad if grad.stride(2) == 1 else grad.contiguous()
        numbers, sizes = _checked(steps, weights, *((0, 0) if grad is None else grad.stride()[:2]), to_state)
        panels = weights.new_empty(whole(width, PANEL) * 4 * width)
        before = _places(steps.gates, weights, steps.cells, steps.tanh_c)
        arriving = 0 if grad is None else grad.data_ptr()
        run_back(*before, arriving, *_places(*of_states, panels), numbers, sizes, _workers(steps))

    return Passes(forward, back)


def _checked(steps: SavedSteps, weights: Tensor, *more: int) -> tuple[Array[c_int64], Array[c_int64]]:
    """Sizes as the compiled code takes them. Raises if they do not fit together: it would write past the end of a tensor. No
    message tells the number of records, which is private."""
    t, b, width = steps.tanh_c.shape
    expected = ((t, b, 4 * width), (t + 1, b, width), (t + 1, b, width), (4 * width, width))
    tensors = (steps.gates, steps.hidden, steps.cells, weights)
    if tuple(tuple(tensor.shape) for tensor in tensors) != expected or len(steps.sizes) != t:
        raise ValueError("what the layer has saved does not fit its weights.")
    if not all(tensor.is_contiguous() for tensor in (*tensors, steps.tanh_c)):
        raise ValueError("the compiled code takes tensors without gaps.")
    if not all(0 <= n <= b for n in steps.sizes):
        raise ValueError("some positions have more records than the layer.")
    numbers = (t, b, width, steps.reverse, *more)
    return (COUNT * len(numbers))(*numbers), (COUNT * t)(*steps.sizes)


def _places(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _workers(steps: SavedSteps) -> int:
    """No thread without a record."""
    return max(1, min(threads(steps.gates.nbytes), whole(steps.gates.shape[1], ROWS) // ROWS))
