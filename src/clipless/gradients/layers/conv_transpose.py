"""Transposed convolutions in one, two and three dimensions: groups, stride, dilation, output padding."""

import torch.nn.functional as F
from torch import Tensor, nn

from clipless.gradients.forms import Form, Instantiated
from clipless.gradients.layers.conv import ConvTranspose, Correlation
from clipless.gradients.layers.rule import Use, register


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def conv_transpose(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    """The weight's gradient is that of the convolution which maps output gradients to input gradients: the module's
    input takes the place of the gradient, and the gradient that of the input."""
    module = use.module
    assert isinstance(module, ConvTranspose)
    acts = use.batched(rank=2 + len(module.kernel_size))  # [b,i,*s]
    grad = grads[0].to(acts.dtype)  # [b,o,*t]
    forms: dict[str, Form] = {}
    if "weight" in use.wanted:
        seen, padding = padded(module, acts, grad)
        forms["weight"] = Correlation(module, seen, acts, padding)
    if "bias" in use.wanted:
        forms["bias"] = Instantiated(grad.flatten(2).sum(2))
    return forms


def padded(module: ConvTranspose, acts: Tensor, grad: Tensor) -> tuple[Tensor, list[int]]:
    """The padded gradient of the output, and the zero padding that is left to the convolution itself.

    Output padding, by the module or by `output_size`, extends the output on the far side, so there is that much less zero
    padding there, and none beyond the kernel's last position.
    """
    padding: list[int] = list(module.padding)  # type: ignore[arg-type]
    geometry = zip(acts.shape[2:], module.stride, padding, module.dilation, module.kernel_size, strict=True)
    natural = [(s - 1) * stride - 2 * pad + dilation * (k - 1) + 1 for s, stride, pad, dilation, k in geometry]
    extra = [t - size for t, size in zip(grad.shape[2:], natural, strict=True)]
    if not any(extra):
        return grad, padding
    sides = [side for pad, more in zip(reversed(padding), reversed(extra), strict=True) for side in (pad, pad - more)]
    return F.pad(grad, sides), [0] * len(padding)
