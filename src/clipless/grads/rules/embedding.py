"""Embedding tables."""

import torch
from torch import Tensor, nn

from clipless.grads.pieces import Piece, Scattered
from clipless.grads.rules.use import Use, at_least_float32, register


@register(nn.Embedding)
def embedding(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Piece]:
    """`padding_idx` rows get no gradient. Tables with `max_norm` or `scale_grad_by_freq` are refused beforehand."""
    table = use.module
    assert isinstance(table, nn.Embedding)
    indices = use.input.flatten(1) if use.input.dim() > 1 else use.input.unsqueeze(1)  # [b,t]
    grad = at_least_float32(grads[0]).reshape(*indices.shape, -1)  # [b,t,d]
    if table.padding_idx is not None:
        grad = torch.where((indices == table.padding_idx).unsqueeze(2), 0.0, grad)
    return {"weight": Scattered(indices, grad, table.num_embeddings)}
