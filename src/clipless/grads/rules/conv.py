"""Convolutions in one, two and three dimensions: groups, stride, dilation, every padding mode."""

import math
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipless.grads.pieces import Instantiated, OuterProducts, Piece, kept, scaled, sq_norm
from clipless.grads.rules.use import Use, at_least_float32, register

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Piece]:
    module = use.module
    assert isinstance(module, Conv)
    acts = use.batched(rank=2 + len(module.kernel_size))
    grad = at_least_float32(grads[0]).to(acts.dtype)
    pieces: dict[str, Piece] = {}
    if "weight" in use.wanted:
        acts, padding = padded(module, acts)
        pieces["weight"] = Correlation(module, acts, grad, padding)
    if "bias" in use.wanted:
        pieces["bias"] = Instantiated(grad.flatten(2).sum(2))
    return pieces


def padded(module: Conv, acts: Tensor) -> tuple[Tensor, list[int]]:
    """The input as the kernel sees it, and the zero padding that is left to the convolution itself."""
    rank = len(module.kernel_size)
    if module.padding_mode != "zeros":
        return F.pad(acts, module._reversed_padding_repeated_twice, mode=module.padding_mode), [0] * rank
    if module.padding == "same":
        return F.pad(acts, module._reversed_padding_repeated_twice), [0] * rank
    if module.padding == "valid":
        return acts, [0] * rank
    return acts, list(module.padding)  # type: ignore[arg-type]


class Correlation:
    """A convolution's weight gradient, g_b = the correlation of record b's input with its output's gradient.

    A transposed convolution gives them in each other's place.
    """

    def __init__(self, module: Conv | ConvTranspose, acts: Tensor, grads: Tensor, padding: list[int]) -> None:
        self.module, self.acts, self.grads, self.padding = module, acts, grads, padding  # [b,c,*s] [b,o,*t]

    @cached_property
    def sq_norms(self) -> Tensor:
        positions = math.prod(self.grads.shape[2:])
        if self.module.groups == 1 and len(self.padding) == 2 and 2 * positions**2 <= self.module.weight.numel():
            return OuterProducts(self._patches(), self.grads.flatten(2).mT).sq_norms
        return sq_norm(self._written_out)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        if "_written_out" in self.__dict__:
            return Instantiated(self._written_out).weighted_sum(factors)
        return self._weight_gradient(self.acts, scaled(self.grads, factors), self.module.groups, copies=1)

    def per_record(self) -> Tensor:
        return self._written_out

    def keep(self, mask: Tensor) -> "Correlation":
        return Correlation(self.module, kept(self.acts, mask), kept(self.grads, mask), self.padding)

    @cached_property
    def _written_out(self) -> Tensor:
        """One grouped convolution, with the records as its groups."""
        b = self.acts.shape[0]
        acts, grads = self.acts.reshape(1, -1, *self.acts.shape[2:]), self.grads.reshape(1, -1, *self.grads.shape[2:])
        weights = self._weight_gradient(acts, grads, groups=b * self.module.groups, copies=b)
        return weights.view(b, *self.module.weight.shape)

    def _patches(self) -> Tensor:
        module = self.module
        assert isinstance(module, nn.Conv2d | nn.ConvTranspose2d)
        columns = F.unfold(self.acts, module.kernel_size, module.dilation, tuple(self.padding), module.stride)
        return columns.mT  # [b,t,i]

    def _weight_gradient(self, acts: Tensor, grads: Tensor, groups: int, copies: int) -> Tensor:
        out, *kernel = self.module.weight.shape
        weight = acts.new_empty(copies * out, *kernel)  # its shape is asked for, its values are not read
        stride, dilation = list(self.module.stride), list(self.module.dilation)
        rank, mask = len(self.padding), [False, True, False]
        _, gradient, _ = torch.ops.aten.convolution_backward(
            grads, acts, weight, None, stride, self.padding, dilation, False, [0] * rank, groups, mask
        )
        return gradient
