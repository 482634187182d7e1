"""lstm.c: the elementwise part of an LSTM cell at one time step, forward and back, in one pass each."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from clipless.native.library import COUNT, POINTER, function, threads


class Passes(NamedTuple):
    """Both passes, in place, for float32 tensors without gaps in main memory: gates [b,4,o], all others [b,o]. What is still
    to be added to the gates' sums may be given apart."""

    step: Callable[
        [Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], None
    ]  # gates, apart, c, new c, its tanh, new h
    back: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]  # gates, c, tanh of new c, gradients of h and c


def build(library: Path) -> Passes | None:
    run_step = function(library, "clipless_lstm_step", *[POINTER] * 6, *[COUNT] * 3)
    run_back = function(library, "clipless_lstm_back", *[POINTER] * 5, *[COUNT] * 3)
    if run_step is None or run_back is None:
        return None

    def step(gates: Tensor, apart: Tensor | None, *states: Tensor) -> None:
        assert all(tensor.is_contiguous() for tensor in (gates, *states))
        assert apart is None or (apart.is_contiguous() and apart.shape == gates.shape)
        more = 0 if apart is None else apart.data_ptr()
        places = [tensor.data_ptr() for tensor in states]
        run_step(gates.data_ptr(), more, *places, *states[0].shape, threads(gates.nbytes))

    def back(gates: Tensor, *others: Tensor) -> None:
        assert all(tensor.is_contiguous() for tensor in (gates, *others))
        places = [tensor.data_ptr() for tensor in others]
        run_back(gates.data_ptr(), *places, *others[0].shape, threads(gates.nbytes))

    return Passes(step, back)
