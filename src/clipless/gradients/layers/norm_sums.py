"""Scale and shift after a normalisation along the last dimensions: their gradients per record.

Index legend: b record, t position, d feature.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from clipless.native import checked
from clipless.native.layer_norm import WIDEST, Sums, build


def norm_sums(x: Tensor, grad: Tensor, trailing: int, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """The gradients of scale and shift, [b, *shape], from the input [b, ..., *shape] of a normalisation along the last
    `trailing` dimensions and the gradient of its output. Without `centred` the mean is not subtracted."""
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


def _pairs(sums: Sums) -> Iterator[tuple[Tensor, Tensor]]:
    """For numbers of positions and features that are no multiple of a block."""
    for t, d, centred in ((1, 1, True), (130, 37, True), (3, 256, False), (260, 3, False)):
        x = torch.linspace(-3, 3, 2 * t * d).mul_(17).sin_().view(2, t, d) + 0.5
        grad = torch.linspace(-1, 1, 2 * t * d).view(2, t, d)
        yield from zip(sums(x, grad, 1e-5, centred), by_torch(x, grad, 1e-5, centred), strict=True)


compiled = checked(build, _pairs, rtol=1e-4, atol=1e-4)
