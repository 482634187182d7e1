"""Convolutions in one, two and three dimensions: groups, stride, dilation, every padding mode."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipless.gradients.forms import (
    Cost,
    Form,
    Instantiated,
    OuterProducts,
    Rearranged,
    kept,
    product_methods,
    scaled,
    sq_norm,
)
from clipless.gradients.layers import conv_rows
from clipless.gradients.layers.rule import Use, register
from clipless.native.conv import ConvRows, Geometry, puts_channels_innermost
from clipless.native.tiles import LANES, ROWS, whole

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
# For the cost model: how often a grouped convolution moves its result, and the cost of each of its groups, in calls.
GROUPED_MOVES = 6
GROUPED_CALL = 4
# The compiled method lays patches out in the cache, where they move faster than through memory.
IN_CACHE = 1 / 3
ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@dataclass(frozen=True)
class Convolution:
    """A convolution that is called as a function: all that a weight's gradient needs besides tensors. Of the weight, only
    the shape is used."""

    weight: Tensor
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def kernel_size(self) -> tuple[int, ...]:
        return tuple(self.weight.shape[2:])


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    module = use.module
    assert isinstance(module, Conv)
    acts = use.batched(rank=2 + len(module.kernel_size))
    grad = grads[0].to(acts.dtype)
    forms: dict[str, Form] = {}
    if "weight" in use.wanted:
        acts, padding = padded(module, acts)
        forms["weight"] = Correlation(module, acts, grad, padding)
    if "bias" in use.wanted:
        forms["bias"] = Instantiated(grad.flatten(2).sum(2))
    return forms


def padded(module: Conv, acts: Tensor) -> tuple[Tensor, list[int]]:
    """The padded input, and the zero padding that is left to the convolution itself."""
    rank = len(module.kernel_size)
    if module.padding_mode != "zeros":
        return F.pad(acts, module._reversed_padding_repeated_twice, mode=module.padding_mode), [0] * rank
    if module.padding == "same":
        return F.pad(acts, module._reversed_padding_repeated_twice), [0] * rank
    if module.padding == "valid":
        return acts, [0] * rank
    return acts, list(module.padding)  # type: ignore[arg-type]


def spread_padding(acts: Tensor, padding: Any, how: Convolution) -> tuple[Tensor, list[int]]:
    """As `padded`, for the `padding` argument of a convolution that is called as a function."""
    rank = len(how.kernel_size)
    if padding == "same":
        both = [d * (k - 1) for d, k in zip(reversed(how.dilation), reversed(how.kernel_size), strict=True)]
        return F.pad(acts, [side for all_ in both for side in (all_ // 2, all_ - all_ // 2)]), [0] * rank
    if isinstance(padding, str):
        return acts, [0] * rank
    return acts, [padding] * rank if isinstance(padding, int) else list(padding)


class Correlation:
    """A convolution's weight gradient: g_b is the correlation of record b's input with the gradient of its output.

    For a transposed convolution the two are swapped.
    """

    def __init__(
        self, module: Conv | ConvTranspose | Convolution, acts: Tensor, grads: Tensor, padding: list[int]
    ) -> None:
        self.module, self.acts, self.grads, self.padding = module, acts, grads, padding  # [b,c,*s] [b,o,*t]

    def __len__(self) -> int:
        return len(self.acts)

    @property
    def terms(self) -> int:
        return math.prod(self.grads.shape[2:])

    @property
    def sq_norms(self) -> Tensor:
        return sq_norm(self.per_record())

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        share = self._weight_gradient(self.acts, scaled(self.grads, factors), self.module.groups, copies=1)
        torch.add(share, total, alpha=beta, out=total) if beta else total.copy_(share)

    def per_record(self) -> Tensor:
        """Computed by one grouped convolution, with the records as groups."""
        b = self.acts.shape[0]
        acts, grads = self.acts.reshape(1, -1, *self.acts.shape[2:]), self.grads.reshape(1, -1, *self.grads.shape[2:])
        weights = self._weight_gradient(acts, grads, groups=b * self.module.groups, copies=b)
        return weights.view(b, *self.module.weight.shape)

    def scaled_rows(self, scale: Tensor) -> "Correlation":
        """The form with every row of the weight's gradients times its own number."""
        wide = scale.to(self.grads.dtype).view(-1, *[1] * (self.grads.dim() - 2))
        return Correlation(self.module, self.acts, self.grads * wide, self.padding)

    def keep(self, mask: Tensor) -> "Correlation":
        return Correlation(self.module, kept(self.acts, mask), kept(self.grads, mask), self.padding)

    def rows(self, some: slice) -> "Correlation":
        return Correlation(self.module, self.acts[some], self.grads[some], self.padding)

    def methods(self) -> Mapping[str, Cost]:
        b, o, *positions = self.grads.shape
        t, i, size = math.prod(positions), math.prod(self.module.weight.shape[1:]), self.acts.element_size()
        flops, weights = 2.0 * b * t * i * o, float(size * b * i * o)
        methods = {"grouped": Cost(flops, GROUPED_MOVES * weights, calls=GROUPED_CALL * b, held=weights)}
        patches = float(size * b * t * i)
        if self._compiled() is not None:
            groups, channels = self.module.groups, self.module.weight.shape[1]
            innermost = puts_channels_innermost(channels)
            columns = whole(channels, LANES) * (i // channels) if innermost else whole(i, LANES)
            moved = 3 * weights + (0.0 if innermost else IN_CACHE * groups * patches)
            operations = 2.0 * b * t * groups * whole(o // groups, ROWS) * columns
            methods["compiled"] = Cost(operations, moved, calls=4, held=weights)
        if self.module.groups == 1:
            for method, cost in product_methods(b, t, i, o, size).items():
                held = cost.held + (patches if method == "ghost" else 0)
                methods[method] = replace(cost, moved=cost.moved + 3 * patches, calls=cost.calls + 8, held=held)
        return methods

    def by(self, method: str) -> Form:
        if method == "grouped":
            return Instantiated(self.per_record())
        if method == "compiled" and (rows := self._compiled()) is not None:
            return Instantiated.with_norms(*rows(self.acts, self.grads, self.module.weight.shape, self._geometry))
        matrix = OuterProducts(self._patches(), self.grads.flatten(2).mT)
        _, channels, *kernel = self.module.weight.shape
        order = (0, len(kernel) + 1, *range(1, len(kernel) + 1))
        return Rearranged(matrix.by(method), (*kernel, channels), order)

    @property
    def _geometry(self) -> Geometry:
        return Geometry(self.padding, self.module.stride, self.module.dilation, self.module.groups)

    def _compiled(self) -> ConvRows | None:
        """The compiled method, if it takes these tensors."""
        fits = self.acts.dtype is torch.float32 and self.acts.is_cpu and self.acts.dim() < 5
        return conv_rows.compiled() if fits else None

    def _patches(self) -> Tensor:
        """The receptive field of each position of the output, [b,t,i], channels innermost so that copies are long runs."""
        module, sizes = self.module, self.grads.shape[2:]
        sides = [side for pad in reversed(self.padding) for side in (pad, pad)]
        seen = F.pad(self.acts, sides).movedim(1, -1).contiguous()  # [b,*s,c]
        b, *_, channels = seen.shape
        record, *steps, one = seen.stride()
        moves = [step * stride for step, stride in zip(steps, module.stride, strict=True)]
        inner = [step * dilation for step, dilation in zip(steps, module.dilation, strict=True)]
        shape = (b, *sizes, *module.kernel_size, channels)
        patches = seen.as_strided(shape, (record, *moves, *inner, one)).clone(memory_format=torch.contiguous_format)
        return patches.view(b, math.prod(sizes), -1)

    def _weight_gradient(self, acts: Tensor, grads: Tensor, groups: int, copies: int) -> Tensor:
        out, *kernel = self.module.weight.shape
        weight = acts.new_empty(copies * out, *kernel)  # only its shape is used
        stride, dilation = list(self.module.stride), list(self.module.dilation)
        rank, mask = len(self.padding), [False, True, False]
        _, gradient, _ = torch.ops.aten.convolution_backward(
            grads, acts, weight, None, stride, self.padding, dilation, False, [0] * rank, groups, mask
        )
        return gradient
