"""Operations on parameters and records whose per-sample gradients are known in closed form."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from clipless.gradients.capture.roots import FromParameters
from clipless.gradients.capture.writes import Function
from clipless.gradients.forms import Form, Instantiated, OuterProducts, Routed, Scattered, Stacked, by_record
from clipless.gradients.layers.conv import Convolution, Correlation, spread_padding
from clipless.gradients.layers.linear import positions
from clipless.gradients.trees import Dims
from clipless.torch_internals import GROUPED_PRODUCTS


class Operation(Protocol):
    """An operation in which traced tensors meet the records."""

    func: Function
    traced: list[FromParameters]
    out_dims: Dims
    record: Tensor | None

    def records_first(self, tensors: list[Tensor]) -> list[Tensor]:
        """Its plain tensors with the records in front."""

    def arguments(self, traced: list[Any], tensors: list[Any], records: int) -> tuple[Any, Any]:
        """Its arguments with these tensors in place of its own, and this number of records in sizes."""


def reduced(grads: Tensor, shape: torch.Size) -> Tensor:
    """Per-record gradients [b, ...] of something that was broadcast, summed to the shape it had before, [b, *shape]."""
    extra = grads.dim() - 1 - len(shape)
    grads = grads.sum(tuple(range(1, 1 + extra))) if extra > 0 else grads
    wide = tuple(k + 1 for k, size in enumerate(shape) if size == 1 and grads.shape[k + 1] != 1)
    return grads.sum(wide, keepdim=True) if wide else grads


def _linear(crossing: Operation, tensors: list[Tensor], grad_output: Tensor) -> list[Form] | None:
    args, _ = crossing.arguments([None] * len(crossing.traced), list(tensors), records=1)
    if not args or args[0] is None or args[0].dim() < 2:
        return None
    acts, grads = positions(crossing.records_first(tensors)[0]), positions(grad_output)
    by_rank: dict[int, Form] = {2: OuterProducts(acts, grads.to(acts.dtype)), 1: Instantiated(grads.sum(1))}
    if len(tensors) > 1 or any(tensor.value.dim() not in by_rank for tensor in crossing.traced):
        return None
    return [by_rank[tensor.value.dim()] for tensor in crossing.traced]


def _embedding(crossing: Operation, tensors: list[Tensor], grad_output: Tensor) -> list[Form] | None:
    args, kwargs = crossing.arguments([None] * len(crossing.traced), crossing.records_first(tensors), records=1)
    plain_lookup = all(kwargs.get(name) is None for name in ("padding_idx", "max_norm"))
    if len(crossing.traced) != 1 or len(args) > 2 or not plain_lookup:
        return None
    indices = args[0].flatten(1) if args[0].dim() > 1 else args[0].unsqueeze(1)
    size, width = crossing.traced[0].value.shape
    return [Scattered(indices, grad_output.reshape(*indices.shape, width), size)]


def _spread(crossing: Operation, tensors: list[Tensor], grad_output: Tensor) -> list[Form] | None:
    dim = crossing.out_dims[0] or 0
    return [Instantiated(reduced(grad_output.unsqueeze(dim + 1), crossing.traced[0].value.shape))]


def _sum(crossing: Operation, tensors: list[Tensor], grad_output: Tensor) -> list[Form] | None:
    args, kwargs = crossing.arguments([None] * len(crossing.traced), list(tensors), records=1)
    if kwargs or len(args) != 2 or len(crossing.traced) != 1:
        return None
    return _spread(crossing, tensors, grad_output)


def _matmul(crossing: Operation, tensors: list[Tensor], grad_output: Tensor) -> list[Form] | None:
    """x @ W for a matrix W."""
    args, _ = crossing.arguments([None] * len(crossing.traced), list(tensors), records=1)
    if len(args) != 2 or args[0] is None or args[0].dim() < 2 or crossing.traced[0].value.dim() != 2:
        return None
    acts, grads = positions(crossing.records_first(tensors)[0]), positions(grad_output)
    return [OuterProducts(grads.to(acts.dtype), acts)]


def experts(crossing: Operation, tensors: list[Tensor], grads: Tensor, records: int) -> Form | None:
    """x[n] @ W[e] for every row n, where offsets say which rows go to which matrix e."""
    args, kwargs = crossing.arguments([None] * len(crossing.traced), list(tensors), records=1)
    given = dict(zip(("acts", "weight", "offs"), args, strict=False)) | kwargs
    acts, offsets = given["acts"], given.get("offs")
    if acts is None or acts.dim() != 2 or offsets is None or len(crossing.traced) != 1:
        return None
    record = torch.arange(records, device=acts.device) if crossing.record is None else crossing.record
    grads, ends = grads.to(acts.dtype).unsqueeze(1), [0, *offsets.tolist()]
    parts: dict[int, Form] = {}
    for number, (first, last) in enumerate(pairwise(ends)):
        if last > first:
            products = OuterProducts(grads[first:last], acts[first:last].unsqueeze(1))
            parts[number] = by_record([Routed(products, record[first:last], records)])[0]
    return Stacked(parts, len(crossing.traced[0].value)) if parts else None


_CONVOLUTIONS: dict[Function, int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


def _convolution(crossing: Operation, tensors: list[Tensor], grad_output: Tensor) -> list[Form] | None:
    """A convolution whose weight was computed from parameters alone is a convolution with that weight."""
    ours = list(range(len(crossing.traced)))
    args, kwargs = crossing.arguments(ours, list(tensors), records=1)
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = dict(zip(names, args, strict=False)) | kwargs
    acts, weight, bias, rank = given["input"], given["weight"], given.get("bias"), _CONVOLUTIONS[crossing.func]
    if not isinstance(acts, Tensor) or acts.dim() != rank + 2 or crossing.out_dims[0] != 0 or len(tensors) > 1:
        return None
    forms: dict[int, Form] = {}
    if isinstance(weight, int):
        shape = crossing.traced[weight].value
        sizes = [given.get(name, 1) for name in ("stride", "dilation")]
        stride, dilation = ((size,) * rank if isinstance(size, int) else tuple(size) for size in sizes)
        how = Convolution(shape.detach(), stride, dilation, given.get("groups", 1))
        acts, padding = spread_padding(acts, given.get("padding", 0), how)
        forms[weight] = Correlation(how, acts, grad_output.to(acts.dtype), padding)
    if isinstance(bias, int):
        forms[bias] = Instantiated(grad_output.flatten(2).sum(2))
    return [forms[number] for number in ours] if len(forms) == len(ours) else None


QUICK: dict[Function, Callable[[Operation, list[Tensor], Tensor], list[Form] | None]] = {
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    nn.functional.linear: _linear,
    nn.functional.embedding: _embedding,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.expand_as: _spread,
    Tensor.expand: _spread,
    torch.add: _sum,
    Tensor.add: _sum,
    Tensor.__add__: _sum,
    Tensor.__radd__: _sum,
}
EXPERTS = GROUPED_PRODUCTS
