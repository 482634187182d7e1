"""Linear layers, for inputs of any rank."""

from torch import Tensor, nn

from clipless.gradients.forms import Form, Instantiated, OuterProducts
from clipless.gradients.layers.rule import Use, register, register_named


@register(nn.Linear)
def linear(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    given = grads[0] if grads[0].dtype is use.input.dtype else grads[0].to(use.input.dtype)
    acts, grad = use.input, given  # [b,i] [b,o]
    if given.dim() != 2:
        acts, grad = positions(acts), positions(given)  # [b,t,i] [b,t,o]
    bias = Instantiated(grad if grad.dim() == 2 else summed(grad)) if "bias" in use.wanted else None
    forms: dict[str, Form] = {} if bias is None else {"bias": bias}
    if "weight" in use.wanted:
        forms["weight"] = OuterProducts(acts, grad, summed=bias)
    return forms


@register_named("transformers.pytorch_utils.Conv1D")
def linear_transposed(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    """The linear layer of GPT-2, whose weight is [i,o]."""
    acts = positions(use.input)  # [b,t,i]
    grad = positions(grads[0]).to(acts.dtype)  # [b,t,o]
    forms: dict[str, Form] = {}
    if "weight" in use.wanted:
        forms["weight"] = OuterProducts(grad, acts)
    if "bias" in use.wanted:
        forms["bias"] = Instantiated(summed(grad))
    return forms


def summed(grad: Tensor) -> Tensor:
    """The sum of [b,t,o] over positions, [b,o]; a view if there is only one position."""
    return grad.squeeze(1) if grad.shape[1] == 1 else grad.sum(1)


def positions(tensor: Tensor) -> Tensor:
    """[b, ..., d] as [b, t, d]."""
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor.flatten(1, -2)
