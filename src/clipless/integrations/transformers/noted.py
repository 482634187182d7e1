"""The function from a micro-batch to its losses, which a private step calls and may call again, and the sum of what it gave
when it was called first."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clipless.errors import InvalidArgument
from clipless.integrations.transformers.losses import REMEDY

LossFunctionOfParts = Callable[[nn.Module, Any], Any]


class NotedLosses:
    """Adds up the losses of several micro-batches, each the first time that they are computed."""

    def __init__(self, function: LossFunctionOfParts, prepare: Callable[[Any], Any]) -> None:
        self._function, self._prepare = function, prepare
        self._parts: list[Tensor] = []

    @property
    def total(self) -> Tensor:
        """The sum of all losses."""
        return torch.stack(self._parts).sum() if self._parts else torch.zeros(())

    def of_next_part(self) -> LossFunctionOfParts:
        """The function for one micro-batch."""
        number = len(self._parts)

        @functools.wraps(self._function)
        def record_losses(model: nn.Module, part: Any) -> Tensor:
            losses = self._function(model, self._prepare(part))
            if not isinstance(losses, Tensor) or losses.dim() != 1:
                shape = f"of {losses.dim()} dimensions" if isinstance(losses, Tensor) else type(losses).__name__
                raise InvalidArgument(f"the loss is {shape}, and a private step needs every record's own: {REMEDY}")
            if len(self._parts) == number:
                self._parts.append(losses.detach().sum())
            return losses

        return record_losses
