"""Bilinear layers, for inputs of any rank."""

from torch import Tensor, nn

from clipless.gradients.forms import Form, Instantiated, OuterProducts, Rearranged
from clipless.gradients.layers.linear import positions
from clipless.gradients.layers.rule import Use, register


@register(nn.Bilinear)
def bilinear(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    left, right = (positions(use.arguments[name]) for name in ("input1", "input2"))  # [b,t,i] [b,t,j]
    grad = positions(grads[0]).to(left.dtype)  # [b,t,o]
    forms: dict[str, Form] = {}
    if "weight" in use.wanted:
        pairs = (left.unsqueeze(3) * right.unsqueeze(2)).flatten(2)  # [b,t,ij]
        forms["weight"] = Rearranged(OuterProducts(pairs, grad), (left.shape[2], right.shape[2]), (0, 1, 2))
    if "bias" in use.wanted:
        forms["bias"] = Instantiated(grad.sum(1))
    return forms
