"""Matrix products of recurrent layers, by whichever of torch's two libraries is faster on this processor.

torch multiplies by MKL, which runs on AMD's processors what it has for vectors of 256 bits. From Zen 5 on they compute 512
at a time, and oneDNN, with which torch computes convolutions, is twice as fast there. Which library it is depends on the
processor and on the sizes, never on measured times: a run that is resumed takes the same products again.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from clipless.processor import AMD, Processor, processor
from clipless.torch_internals import get_mkldnn_enabled, onednn_linear

# The first family of AMD's processors that compute 512 bits at a time.
ZEN_5 = 26
# Products of fewer operations are left to MKL, which takes less time to begin.
WORTH_IT = 4e6

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left @ right, [m,k] and [k,n], plus a bias [n]; a new tensor."""
    linear = _linear(left, right, left.numel() * right.shape[1])
    if linear is not None:
        return linear(left, right.mT, bias) if bias is not None else _by(linear, left, right)
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def add_product(total: Tensor, left: Tensor, right: Tensor, beta: int = 1) -> Tensor:
    """total = beta · total + left @ right, in place, with beta 0 or 1; returns the total."""
    linear = _linear(left, right, left.numel() * right.shape[1])
    if linear is None:
        return total.addmm_(left, right, beta=beta)
    made = _by(linear, left, right)
    return total.add_(made) if beta else total.copy_(made)


def _by(linear: Linear, left: Tensor, right: Tensor) -> Tensor:
    """left @ right. oneDNN copies the first factor unless its rows lie side by side: the cheaper one is the first."""
    across = right.mT
    if left.is_contiguous() or _copied(across) + len(left) * len(across) >= left.numel():
        return linear(left, across, None)
    return linear(across, left, None).mT


def _copied(rows: Tensor) -> int:
    return 0 if rows.is_contiguous() else rows.numel()


def _linear(left: Tensor, right: Tensor, terms: int) -> Linear | None:
    """oneDNN's product, if it is the faster one for these and so many terms in all."""
    if not terms or 2.0 * terms < WORTH_IT or not prefers_onednn(processor()):
        return None
    plain = left.dtype is right.dtype is torch.float32 and left.is_cpu and right.is_cpu
    return by_onednn() if plain and not torch.is_grad_enabled() and get_mkldnn_enabled() else None


@cache
def prefers_onednn(of: Processor | None) -> bool:
    """Whether oneDNN multiplies faster than MKL on a processor.

    >>> prefers_onednn(Processor("AuthenticAMD", 26, 2)), prefers_onednn(Processor("GenuineIntel", 6, 207))
    (True, False)
    """
    capable = torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return capable and of is not None and of.vendor == AMD and of.family >= ZEN_5


@cache
def by_onednn() -> Linear | None:
    """left @ rightᵀ + bias by oneDNN, [m,k], [n,k] and [n]; None if torch has it no more, or it computes something else."""
    if onednn_linear is None:
        return None

    def linear(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        return onednn_linear(left, right, bias, *_NOTHING_AFTERWARDS)

    try:
        with torch.autocast("cpu", enabled=False):  # which would round what it is compared with
            same = all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in _pairs(linear))
    except (RuntimeError, TypeError):
        return None
    return linear if same else None


# No function of the result, its numbers, and no choice of how to compute it.
_NOTHING_AFTERWARDS: Sequence[Any] = ("none", [], "")


def _pairs(linear: Linear) -> list[tuple[Tensor, Tensor]]:
    """What it gives beside what MKL gives, for tensors as they lie in memory and turned."""
    left, right, bias = (
        torch.linspace(-3, 3, n, device="cpu", dtype=torch.float32).mul_(17).sin_() for n in (40 * 33, 33 * 20, 20)
    )
    pairs = [
        (left.view(40, 33), right.view(20, 33)),
        (left.view(33, 40).mT, right.view(33, 20).mT),
        (left.view(33, 40)[:, :24].mT, right.view(20, 33)[3:]),
    ]
    found = [(linear(a, b, None), a @ b.mT) for a, b in pairs]
    return [*found, (linear(*pairs[0], bias), pairs[0][0] @ pairs[0][1].mT + bias)]
