"""Writing a value into a tensor with records, in place or by index, so that each record gets its own copy of the value.

Index legend: b record.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


def by_record(copies: Tensor, target: Tensor, dim: int, index: Any) -> Tensor:
    """The numbers that `target[index] = value` writes, each taken from the copy of the value that belongs to its record.
    `copies` [b, ...] has one copy per record; `dim` is the dimension of the records in the target.

    >>> by_record(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 3), 0, torch.eye(2, 3).bool())
    tensor([1., 2.])
    """
    shape = tuple(-1 if k == dim else 1 for k in range(target.dim()))
    record = torch.arange(len(copies), device=target.device).view(shape).expand(target.shape)[index]
    value = copies.shape[1:]
    while len(value) > record.dim() and value[0] == 1:
        value = value[1:]
    numbers = copies.flatten(1) if copies.dim() > 1 else copies.unsqueeze(1)
    if numbers.numel() > 0 and value == record.shape[record.dim() - len(value) :]:
        rows = record.reshape(-1, numbers.shape[1])
        if bool((rows == rows[:, :1]).all()):
            return numbers[rows[:, 0]].view(record.shape)
    places = torch.arange(numbers.shape[1], device=target.device).view(value).expand(record.shape)
    return numbers[record, places]


def _everywhere(func: Function, target: Tensor, dim: int, value: Tensor, *rest: Any, **kwargs: Any) -> Any:
    return func(target, value.expand(target.shape), *rest, **kwargs)


def _masked_fill(target: Tensor, dim: int, mask: Tensor, value: Tensor) -> Tensor:
    return target.copy_(torch.where(mask, value.expand(target.shape), target))


def _set_item(target: Tensor, dim: int, index: Any, value: Tensor) -> None:
    target[index] = by_record(value.expand(target.shape[dim], *value.shape), target, dim, index)


def _index_put(target: Tensor, dim: int, indices: Any, value: Tensor, accumulate: bool = False) -> Tensor:
    spread = by_record(value.expand(target.shape[dim], *value.shape), target, dim, tuple(indices))
    return target.index_put_(indices, spread, accumulate)


# How each operation writes a value into a target whose records lie along a dimension: (target, dim, further arguments). The
# value is expanded over the records first. `x += value` arrives as `x.add_(value)`.
WRITES: dict[Function, Function] = {
    **{func: partial(_everywhere, func) for func in (Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_, Tensor.copy_)},
    Tensor.fill_: partial(_everywhere, Tensor.copy_),
    Tensor.masked_fill_: _masked_fill,
    Tensor.__setitem__: _set_item,
    Tensor.index_put_: _index_put,
}
