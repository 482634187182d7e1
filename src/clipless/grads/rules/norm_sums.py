"""Scale and shift after a normalisation along the last dimensions: their gradients per record.

Index legend: b record, t position, d feature.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from clipless.compiled import COUNT, LIBRARY, POINTER, function, threads

# Input and its gradient [b,t,d], the normalisation's eps and whether it takes the mean off; to both gradients [b,d].
Sums = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
# As in the source: wider rows are torch's.
WIDEST = 4096


def norm_sums(x: Tensor, grad: Tensor, trailing: int, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """The gradients of scale and shift, [b, *shape], from the input [b, ..., *shape] of a normalisation along the last
    `trailing` dimensions and the gradient of its output. Without `centred` the mean is not taken off."""
    shape = x.shape[x.dim() - trailing :]
    width = math.prod(shape)
    small = 0 < width <= WIDEST and all(t.is_cpu and t.dtype is torch.float32 and t.is_contiguous() for t in (x, grad))
    sums = (compiled() if small else None) or by_torch
    rows = (len(x), x.numel() // max(width * len(x), 1), width)
    scale, shift = sums(x.reshape(rows), grad.reshape(rows), eps, centred)
    return scale.view(-1, *shape), shift.view(-1, *shape)


def by_torch(x: Tensor, grad: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    normalise = F.layer_norm if centred else F.rms_norm
    normalised = normalise(x, [x.shape[2]], eps=eps)
    return (grad * normalised).sum(1), grad.sum(1)


@functools.cache
def compiled(library: Path = LIBRARY) -> Sums | None:
    """The compiled form, if there is a library and it does what torch does."""
    arguments = (*[POINTER] * 4, *[COUNT] * 3, ctypes.c_double, *[COUNT] * 2)
    run = function("clipless_norm_sums", *arguments, library=library)
    if run is None:
        return None

    def sums(x: Tensor, grad: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
        found = torch.empty(2, x.shape[0], x.shape[2])
        scale, shift = found.unbind()
        places = (tensor.data_ptr() for tensor in (x, grad, scale, shift))
        run(*places, *x.shape, eps, centred, threads(2 * x.nbytes))
        return scale, shift

    return sums if _agrees(sums) else None


def _agrees(sums: Sums) -> bool:
    """Whether it does what torch does, for numbers of positions and features that leave rests."""
    for t, d, centred in ((1, 1, True), (130, 37, True), (3, 256, False), (260, 3, False)):
        x = torch.linspace(-3, 3, 2 * t * d).mul_(17).sin_().view(2, t, d) + 0.5
        grad = torch.linspace(-1, 1, 2 * t * d).view(2, t, d)
        pairs = zip(sums(x, grad, 1e-5, centred), by_torch(x, grad, 1e-5, centred), strict=True)
        if not all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs):
            return False
    return True
