"""layer_norm.c: gradients per record of scale and shift after a normalisation along the last dimension."""

import ctypes
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from clipless.native.library import COUNT, POINTER, function, threads

# Input and its gradient [b,t,d], the normalisation's eps and whether it takes the mean off; to both gradients [b,d].
Sums = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
# As in the source: wider rows do not fit.
WIDEST = 4096


def build(library: Path) -> Sums | None:
    """For float32 tensors without gaps in main memory, of at most WIDEST features."""
    arguments = (*[POINTER] * 4, *[COUNT] * 3, ctypes.c_double, *[COUNT] * 2)
    run = function(library, "clipless_norm_sums", *arguments)
    if run is None:
        return None

    def sums(x: Tensor, grad: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
        scale, shift = x.new_empty(2, x.shape[0], x.shape[2]).unbind()
        places = (tensor.data_ptr() for tensor in (x, grad, scale, shift))
        run(*places, *x.shape, eps, centred, threads(2 * x.nbytes))
        return scale, shift

    return sums
