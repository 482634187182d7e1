"""Multi-head attention as a sequence of operations with at most one parameter each, so that each can be tapped."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What `F.multi_head_attention_forward` computes, for batched [t,b,e] inputs: (output [t,b,e], weights [b,t,s])."""
    if query.dim() != 3 or static_k is not None or static_v is not None:
        raise NotImplementedError("attention without a batch dimension, or with static keys")
    if use_separate_proj_weight:
        weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases: Any = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    batch = query.shape[1]
    if bias_k is not None and bias_v is not None:
        k, v = torch.cat([k, bias_k.expand(1, batch, -1)]), torch.cat([v, bias_v.expand(1, batch, -1)])
    if add_zero_attn:
        zeros = k.new_zeros(1, batch, k.shape[2])
        k, v = torch.cat([k, zeros]), torch.cat([v, zeros])
    mask = _mask(attn_mask, key_padding_mask, batch, num_heads, k.shape[0], q.dtype)
    q, k, v = (_heads(x, num_heads) for x in (q, k, v))  # [b,h,t,d]
    attention = None
    if need_weights:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        attention = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout_p, training)
        mixed = attention @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p if training else 0.0)
    output = F.linear(mixed.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)  # [t,b,e]
    if attention is not None and average_attn_weights:
        attention = attention.mean(1)
    return output, attention


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What `F.scaled_dot_product_attention` computes, with the same random numbers on a processor: computed again for single
    records, as a fused operation has to be, it would drop others. A query that may attend to nothing gets zeros."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        if attn_mask is not None:
            raise RuntimeError("scaled_dot_product_attention takes attn_mask or is_causal, not both")
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        taken = attn_mask.logical_not() if attn_mask.dtype == torch.bool else attn_mask
        scores = scores + _additive(taken, scores.dtype)
    nothing = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return F.dropout(weights, dropout_p) @ value


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)


def _mask(
    attn: Tensor | None, padding: Tensor | None, batch: int, heads: int, keys: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one to be added to the scores, [b,h,t,s] or broadcast to it; added keys are never masked."""
    parts = []
    if attn is not None:
        attn = _additive(attn, dtype)
        attn = attn.view(batch, heads, *attn.shape[1:]) if attn.dim() == 3 else attn
        parts.append(F.pad(attn, (0, keys - attn.shape[-1])))
    if padding is not None:
        padding = F.pad(_additive(padding, dtype), (0, keys - padding.shape[-1]))
        parts.append(padding.view(batch, 1, 1, keys))
    return sum(parts[1:], parts[0]) if parts else None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
