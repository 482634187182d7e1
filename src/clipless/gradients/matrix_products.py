"""Matrix products of the engine, by whichever of torch's two libraries is faster on this processor.

torch multiplies by MKL, which runs on AMD's processors what it has for vectors of 256 bits. From Zen 5 on they compute 512
at a time, and oneDNN, with which torch computes convolutions, is twice as fast there. Which library it is depends on the
processor and on the sizes, never on measured times: a run that is resumed takes the same products again.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from clipless.native.turn import turned
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


def add_weighted(total: Tensor, grads: Tensor, acts: Tensor, factors: Tensor, beta: int) -> None:
    """total [o,i] = beta · total + Σ_b,t factors[b] · grads[b,t]ᵀ acts[b,t], in place, for [b,t,o], [b,t,i] and [b]."""
    weights = factors.to(grads.dtype).unsqueeze(1)
    if grads.stride(0) < grads.stride(1):  # positions first in memory: this order needs no copy
        grads, acts, weights = grads.transpose(0, 1), acts.transpose(0, 1), weights.mT
    outside, inside, rows = grads.shape[2], acts.shape[2], grads.shape[0] * grads.shape[1]
    linear = _linear(grads, acts, outside * rows * inside)
    if linear is None:
        if inside < outside:
            acts = acts * weights.unsqueeze(2)
        else:
            grads = grads * weights.unsqueeze(2)
        # With `out=` autocast leaves the product alone.
        torch.addmm(total, grads.flatten(0, 1).mT, acts.flatten(0, 1), beta=beta, out=total)
        return
    # oneDNN wants the rows of the first factor side by side: the one that takes less to turn, the result included.
    if inside * (rows + outside) < rows * outside:
        made = linear(_weighted_columns(acts, weights), grads.flatten(0, 1).mT, None).mT
    else:
        made = linear(_weighted_columns(grads, weights), acts.flatten(0, 1).mT, None)
    _ = total.add_(made) if beta else total.copy_(made)


def _weighted_columns(rows: Tensor, weights: Tensor) -> Tensor:
    """Rows [p,q,n] times weights [p,q] or what spreads to it, as [n,p·q] in memory of its own."""
    p, q, n = rows.shape
    if q > 1 and rows.mT.is_contiguous():  # columns are there already, one block of them after the other
        made = rows.new_empty(n, p, q)
        return torch.mul(rows.permute(2, 0, 1), weights, out=made).view(n, -1)
    return turned(rows.flatten(0, 1), weights.expand(p, q).flatten())


def products(left: Tensor, right: Tensor) -> Tensor:
    """left @ right for every record, [b,m,k] and [b,k,n]; a new tensor, whatever autocast says."""
    made = left.new_empty(len(left), left.shape[1], right.shape[2])
    linear = _linear(left, right, left.shape[1] * left.shape[2] * right.shape[2])
    if linear is None:
        return torch.bmm(left, right, out=made)
    for one, a, b in zip(made.unbind(0), left.unbind(0), right.unbind(0), strict=True):
        one.copy_(_by(linear, a, b))
    return made


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
