"""A value written by index into a tensor with records: which record each of the written numbers belongs to.

Index legend: b record.
"""

from typing import Any

import torch
from torch import Tensor


def by_record(copies: Tensor, target: Tensor, dim: int, index: Any) -> Tensor:
    """What `target[index] = value` writes, number by number, taken from the copy of the value that belongs to the record
    written to. `copies` [b, ...] has one for each, `dim` is where the records lie in the target.

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
