"""A module at other weights for a while: a rounding error away, or far enough that nothing vanishes by chance."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# What is added to an entry of a vector (a bias, a scale of a norm); a matrix gets what keeps the size of its outputs.
ADDED = 0.1


@contextmanager
def weights_moved(module: nn.Module) -> Iterator[None]:
    """Inside, every weight is off by a rounding error, up or down."""
    generator = torch.Generator().manual_seed(0)

    def moved(weight: Tensor) -> Tensor:
        signs = 2.0 * torch.randint(2, weight.shape, generator=generator).to(weight.device, weight.dtype) - 1.0
        return weight * (1.0 + torch.finfo(weight.dtype).eps * signs)

    with _changed([p for p in module.parameters() if p.is_floating_point()], moved):
        yield


@contextmanager
def weights_shaken(module: nn.Module, number: int) -> Iterator[None]:
    """Inside, the weights that are trained are others, by about what a fresh start would give them: what vanishes at the
    given weights, such as all that a layer of zeros puts out, does not vanish at these. Other ones for another number."""
    generator = torch.Generator().manual_seed(number)

    def shaken(weight: Tensor) -> Tensor:
        inputs = weight[0].numel() if weight.dim() > 1 and len(weight) else 0
        size = inputs**-0.5 if inputs else ADDED
        return weight + size * torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype)

    with _changed([p for p in module.parameters() if p.is_floating_point() and p.requires_grad], shaken):
        yield


@contextmanager
def _changed(weights: list[nn.Parameter], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    before = [weight.detach().clone() for weight in weights]
    try:
        for weight in weights:
            weight.data.copy_(change(weight.data))
        yield
    finally:
        for weight, value in zip(weights, before, strict=True):
            weight.data.copy_(value)
