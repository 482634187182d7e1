"""Operators of somebody's own, by torch.library.custom_op.

Here and nowhere else: an operator that is defined a second time takes the memory of the first one away, and whoever calls
the first one reads what is there now. A file of tests may be imported under two names, which defines its operators twice.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("clipless_tests::scaled_product", mutates_args=())
def scaled_product(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return 2.0 * x.to(weight.dtype) @ weight


@torch.library.custom_op("clipless_tests::dropped_product", mutates_args=())
def dropped_product(x: Tensor, weight: Tensor) -> list[Tensor]:
    kept = 2.0 * torch.bernoulli(torch.full_like(x, 0.5))
    return [(x * kept) @ weight, kept]


@torch.library.custom_op("clipless_tests::several_rows", mutates_args=())
def several_rows(x: Tensor, weight: Tensor) -> list[Tensor]:
    if len(x) == 1:
        raise RuntimeError("one row is too few")
    return [x @ weight, torch.ones_like(x)]


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return (2.0 * grad @ weight.mT).to(x.dtype), 2.0 * x.to(weight.dtype).mT @ grad


def _keep_mask(ctx: Any, inputs: tuple[Tensor, Tensor], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _masked_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    x, weight, kept = ctx.saved_tensors
    return kept * (grads[0] @ weight.mT), (x * kept).mT @ grads[0]


scaled_product.register_autograd(_product_gradients, setup_context=_keep_inputs)
dropped_product.register_autograd(_masked_gradients, setup_context=_keep_mask)
several_rows.register_autograd(_masked_gradients, setup_context=_keep_mask)
