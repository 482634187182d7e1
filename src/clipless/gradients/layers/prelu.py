"""PReLU, with one slope or one for each channel."""

import torch
from torch import Tensor, nn

from clipless.gradients.forms import Form, Instantiated
from clipless.gradients.layers.rule import Use, register


@register(nn.PReLU)
def prelu(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    """Channels lie in dimension 1, as in torch."""
    shared = use.module.num_parameters == 1
    acts = use.input if shared else use.batched(rank=2)  # [b,c,...]
    below = torch.where(acts > 0, 0.0, acts * grads[0])
    channels = 1 if shared else acts.shape[1]
    return {"weight": Instantiated(below.reshape(len(below), channels, -1).sum(2))}
