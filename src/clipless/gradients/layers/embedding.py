"""Embedding tables, row by row and in bags.

Index legend: b record, t position in a bag, v row of the table, d feature.
"""

from typing import Any

import torch
from torch import Tensor, nn

from clipless.errors import UnsupportedModule
from clipless.gradients.forms import Form, NoChoice, Scattered, kept, scaled, sq_norm, widest
from clipless.gradients.layers.rule import Use, register


@register(nn.Embedding)
def embedding(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    """`padding_idx` rows get no gradient. Tables with `max_norm` or `scale_grad_by_freq` are refused before they run."""
    table = use.module
    assert isinstance(table, nn.Embedding)
    indices = (use.input.flatten(1) if use.input.dim() > 1 else use.input.unsqueeze(1)).long()  # [b,t]
    grad = grads[0].reshape(*indices.shape, table.embedding_dim)  # [b,t,d]
    if table.padding_idx is not None:
        grad = torch.where((indices == table.padding_idx).unsqueeze(2), 0.0, grad)
    return {"weight": Scattered(indices, grad, table.num_embeddings)}


@register(nn.EmbeddingBag)
def embedding_bag(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    """One bag per record, [b,t] or given by `offsets`; `padding_idx` is not in the bag."""
    table, given = use.module, use.arguments
    assert isinstance(table, nn.EmbeddingBag)
    if given["input"].dim() == 1 and given.get("offsets") is not None:
        return {"weight": _bags_by_offsets(table, given, grads[0])}
    if given["input"].dim() != 2 or any(dim != 0 for dim in use.dims):
        raise UnsupportedModule(
            f"{table} was given bags that are not the rows of its input, where the indices of all records lie in one "
            "line. Give it a bag per record as a row, [B, T], filled up with a padding_idx."
        )
    indices, grad = given["input"].long(), grads[0]  # [b,t] [b,d]
    inside = torch.ones_like(indices, dtype=torch.bool) if table.padding_idx is None else indices != table.padding_idx
    if table.mode == "max":
        return {"weight": Selected(_largest(table, indices), kept(grad, inside.any(1)), table.num_embeddings)}
    addends = grad.unsqueeze(1)  # [b,1,d]
    if table.mode == "mean":
        addends = addends / inside.sum(1).clamp(min=1).view(-1, 1, 1)
    weights = given.get("per_sample_weights")
    if weights is not None:
        addends = addends * weights.unsqueeze(2)
    return {"weight": Scattered(indices, torch.where(inside.unsqueeze(2), addends, 0.0), table.num_embeddings)}


def _bags_by_offsets(table: nn.EmbeddingBag, given: dict[str, Any], grad: Tensor) -> Form:
    """For all indices in one tensor [n], each in the bag of the last offset [b] before it."""
    line, starts = given["input"].long(), given["offsets"][: len(grad)].long()
    if table.mode == "max":
        settings = (False, 2, False, None, table.include_last_offset, table.padding_idx)
        *_, rows = torch.embedding_bag(table.weight.detach(), line, given["offsets"], *settings)
        return Selected(
            rows.long()[: len(grad)].clamp(min=0), kept(grad, rows[: len(grad)].amin(1) >= 0), table.num_embeddings
        )
    end = int(given["offsets"][-1]) if table.include_last_offset else len(line)
    lengths = torch.cat([starts, starts.new_tensor([end])]).diff()  # [b]
    place = torch.arange(max(int(lengths.max()), 1), device=line.device)
    inside = place < lengths.unsqueeze(1)  # [b,t]
    where = (starts.unsqueeze(1) + place).clamp(max=max(len(line) - 1, 0))
    indices = torch.where(inside, line[where], 0) if len(line) else torch.zeros_like(where)
    if table.padding_idx is not None:
        inside = inside & (indices != table.padding_idx)
    addends = grad.unsqueeze(1)  # [b,1,d]
    if table.mode == "mean":
        addends = addends / inside.sum(1).clamp(min=1).view(-1, 1, 1)
    weights = given.get("per_sample_weights")
    if weights is not None:
        addends = addends * weights[where].unsqueeze(2)
    return Scattered(indices, torch.where(inside.unsqueeze(2), addends, 0.0), table.num_embeddings)


def _largest(table: nn.EmbeddingBag, indices: Tensor) -> Tensor:
    """For every bag and feature, the row of the table that has the maximum, [b,d]; any row for an empty bag."""
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
        wide = scaled(self.grads.to(widest(self.grads.device)), factors)
        sums = wide.new_zeros(total.shape).scatter_add_(0, self.row_of, wide)
        total.add_(sums) if beta else total.copy_(sums)

    def per_record(self) -> Tensor:
        b, d = self.grads.shape
        return self.grads.new_zeros(b, self.size, d).scatter_(1, self.row_of.unsqueeze(1), self.grads.unsqueeze(1))

    def keep(self, mask: Tensor) -> "Selected":
        return Selected(self.row_of, kept(self.grads, mask), self.size)

    def rows(self, some: slice) -> "Selected":
        return Selected(self.row_of[some], self.grads[some], self.size)
