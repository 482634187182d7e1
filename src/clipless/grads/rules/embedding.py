"""Embedding tables, row by row and in bags.

Index legend: b record, t position in a bag, v row of the table, d feature.
"""

import torch
from torch import Tensor, nn

from clipless.errors import UnsupportedModule
from clipless.grads.pieces import NoChoice, Piece, Scattered, kept, scaled, sq_norm
from clipless.grads.rules.use import Use, at_least_float32, register


@register(nn.Embedding)
def embedding(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Piece]:
    """`padding_idx` rows get no gradient. Tables with `max_norm` or `scale_grad_by_freq` are refused beforehand."""
    table = use.module
    assert isinstance(table, nn.Embedding)
    indices = (use.input.flatten(1) if use.input.dim() > 1 else use.input.unsqueeze(1)).long()  # [b,t]
    grad = at_least_float32(grads[0]).reshape(*indices.shape, table.embedding_dim)  # [b,t,d]
    if table.padding_idx is not None:
        grad = torch.where((indices == table.padding_idx).unsqueeze(2), 0.0, grad)
    return {"weight": Scattered(indices, grad, table.num_embeddings)}


@register(nn.EmbeddingBag)
def embedding_bag(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Piece]:
    """One bag per record, [b,t]; `padding_idx` is not in the bag. Bags given by `offsets` are refused."""
    table, given = use.module, use.arguments
    assert isinstance(table, nn.EmbeddingBag)
    if given["input"].dim() != 2 or any(dim != 0 for dim in use.dims):
        raise UnsupportedModule(
            f"{table} was given bags that are not the rows of its input, where the indices of all records lie in one "
            "line. Give it a bag per record as a row, [B, T], filled up with a padding_idx."
        )
    indices, grad = given["input"].long(), at_least_float32(grads[0])  # [b,t] [b,d]
    inside = torch.ones_like(indices, dtype=torch.bool) if table.padding_idx is None else indices != table.padding_idx
    if table.mode == "max":
        return {"weight": Selected(_largest(table, indices), kept(grad, inside.any(1)), table.num_embeddings)}
    shares = grad.unsqueeze(1)  # [b,1,d]
    if table.mode == "mean":
        shares = shares / inside.sum(1).clamp(min=1).view(-1, 1, 1)
    weights = given.get("per_sample_weights")
    if weights is not None:
        shares = shares * weights.unsqueeze(2)
    return {"weight": Scattered(indices, torch.where(inside.unsqueeze(2), shares, 0.0), table.num_embeddings)}


def _largest(table: nn.EmbeddingBag, indices: Tensor) -> Tensor:
    """For every bag and feature the row of the table that gave the maximum, [b,d]; any row for an empty bag."""
    starts = torch.arange(len(indices), device=indices.device) * indices.shape[1]
    settings = (False, 2, False, None, False, table.padding_idx)
    *_, rows = torch.embedding_bag(table.weight.detach(), indices.flatten(), starts, *settings)
    return rows.long().clamp(min=0)


class Selected(NoChoice):
    """g_b has grads[b,d] in row row_of[b,d] of column d of a table [v,d], and zeros elsewhere."""

    def __init__(self, row_of: Tensor, grads: Tensor, size: int) -> None:
        self.row_of, self.grads, self.size = row_of, grads, size  # [b,d] [b,d] v

    def __len__(self) -> int:
        return len(self.grads)

    @property
    def sq_norms(self) -> Tensor:
        return sq_norm(self.grads)

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        if beta == 0:
            total.zero_()
        total.scatter_add_(0, self.row_of, scaled(self.grads, factors))

    def per_record(self) -> Tensor:
        b, d = self.grads.shape
        return self.grads.new_zeros(b, self.size, d).scatter_(1, self.row_of.unsqueeze(1), self.grads.unsqueeze(1))

    def keep(self, mask: Tensor) -> "Selected":
        return Selected(self.row_of, kept(self.grads, mask), self.size)

    def rows(self, some: slice) -> "Selected":
        return Selected(self.row_of[some], self.grads[some], self.size)
