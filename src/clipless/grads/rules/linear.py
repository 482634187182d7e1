"""Linear layers, for inputs of any rank."""

from torch import Tensor, nn

from clipless.grads.pieces import Instantiated, OuterProducts, Piece
from clipless.grads.rules.use import Use, at_least_float32, register, register_named


@register(nn.Linear)
def linear(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Piece]:
    acts = positions(use.input)  # [b,t,i]
    grad = positions(at_least_float32(grads[0])).to(acts.dtype)  # [b,t,o]
    bias = Instantiated(summed(grad)) if "bias" in use.wanted else None
    pieces: dict[str, Piece] = {} if bias is None else {"bias": bias}
    if "weight" in use.wanted:
        pieces["weight"] = OuterProducts(acts, grad, summed=bias)
    return pieces


@register_named("transformers.pytorch_utils.Conv1D")
def linear_transposed(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Piece]:
    """The linear layer of GPT-2, which keeps its weight as [i,o]."""
    acts = positions(use.input)  # [b,t,i]
    grad = positions(at_least_float32(grads[0])).to(acts.dtype)  # [b,t,o]
    pieces: dict[str, Piece] = {}
    if "weight" in use.wanted:
        pieces["weight"] = OuterProducts(grad, acts)
    if "bias" in use.wanted:
        pieces["bias"] = Instantiated(summed(grad))
    return pieces


def summed(grad: Tensor) -> Tensor:
    """[b,t,o] over the positions, [b,o]; a single one is what it is, without a copy."""
    return grad.squeeze(1) if grad.shape[1] == 1 else grad.sum(1)


def positions(tensor: Tensor) -> Tensor:
    """[b, ..., d] as [b, t, d]."""
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor.flatten(1, -2)
