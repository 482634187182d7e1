"""Attention as separate operations: what the fused operation computes, dropout included."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from clipless.gradients.capture.attention import attention_with_dropout

B, H, T, D = 3, 4, 5, 6


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.double)


def partly_blocked() -> Tensor:
    """True where a query may attend; one may attend to nothing."""
    allowed = drawn(B, 1, T, T) > 0
    allowed[0, 0, 2] = False
    return allowed


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"attn_mask": drawn(1, H, T, T)},
    "allowed": {"attn_mask": partly_blocked()},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "fewer keys": {"enable_gqa": True},
}


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_the_fused_operation(options: dict[str, Any], dropout: float) -> None:
    heads = 2 if "enable_gqa" in options else H
    found = []
    for attention in (attention_with_dropout, F.scaled_dot_product_attention):
        query, key, value = (drawn(B, h, T, D).requires_grad_() for h in (H, heads, heads))
        torch.manual_seed(0)
        output = attention(query, key, value, dropout_p=dropout, **options)
        found.append([output, *torch.autograd.grad(output.square().sum(), (query, key, value))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


class Biased(nn.Module):
    """Attention with a learned bias, as in T5."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs, self.output = nn.Linear(3, 2 * D), nn.Linear(2 * D, 2)
        self.bias, self.dropout = nn.Parameter(drawn(1, 2, T, T)), dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inputs(x).unflatten(2, (2, D)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, self.bias, dropout_p=self.dropout)
        return self.output(mixed.transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_learned_bias_is_trained_with_dropout_inside(dropout: float) -> None:
    """Unclipped, the release is the gradient of plain training with the same random numbers."""
    data = TensorDataset(drawn(8, T, 3), torch.arange(8) % 2)
    model, plain = Biased(dropout).double(), Biased(dropout).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clipping = clipless.abadi(threshold=1e3)
    private = clipless.make_private(
        model, optimizer, data, batch_size=8, steps=1, noise_multiplier=1e-9, delta=1e-3, clipping=clipping, seed=1,
        accountant="gdp", loss_reduction="mean"
    )  # fmt: skip
    for x, y in private.loader:
        torch.manual_seed(5)
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        torch.manual_seed(5)
        F.cross_entropy(plain(x), y).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
        assert other.grad.any()
