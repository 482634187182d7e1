"""lstm.c: the elementwise part of an LSTM cell at one time step, forward and back, in one pass each."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from clipless.native.library import COUNT, POINTER, function, threads


class Passes(NamedTuple):
    """Both passes, in place, for float32 tensors without gaps in main memory: gates [b,4,o], all others [b,o]."""

    step: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]  # gates, c, new c, tanh of new c, new h
    back: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]  # gates, c, tanh of new c, gradients of h and c


def build(library: Path) -> Passes | None:
    step, back = _pass(library, "step"), _pass(library, "back")
    return None if step is None or back is None else Passes(step, back)


def _pass(library: Path, name: str) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] | None:
    run = function(library, f"clipless_lstm_{name}", *[POINTER] * 5, *[COUNT] * 3)
    if run is None:
        return None

    def passes(gates: Tensor, c: Tensor, *others: Tensor) -> None:
        tensors = (gates, c, *others)
        assert all(tensor.is_contiguous() for tensor in tensors)
        run(*[tensor.data_ptr() for tensor in tensors], *c.shape, threads(gates.nbytes))

    return passes
