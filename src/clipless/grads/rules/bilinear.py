"""Bilinear layers, for inputs of any rank."""

from torch import Tensor, nn

from clipless.grads.pieces import Instantiated, OuterProducts, Piece, Rearranged
from clipless.grads.rules.linear import positions
from clipless.grads.rules.use import Use, at_least_float32, register


@register(nn.Bilinear)
def bilinear(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Piece]:
    left, right = (positions(use.arguments[name]) for name in ("input1", "input2"))  # [b,t,i] [b,t,j]
    grad = positions(at_least_float32(grads[0])).to(left.dtype)  # [b,t,o]
    pieces: dict[str, Piece] = {}
    if "weight" in use.wanted:
        pairs = (left.unsqueeze(3) * right.unsqueeze(2)).flatten(2)  # [b,t,ij]
        pieces["weight"] = Rearranged(OuterProducts(pairs, grad), (left.shape[2], right.shape[2]), (0, 1, 2))
    if "bias" in use.wanted:
        pieces["bias"] = Instantiated(grad.sum(1))
    return pieces
