"""A record that stands for those of an empty batch."""

from typing import Any

import torch
from torch import Tensor, nn

from clipless.gradients.capture.frames import unseen_by_checkpoints
from clipless.gradients.capture.hooks import Hooks
from clipless.gradients.capture.layout import signature
from clipless.gradients.randomness import random_state_kept
from clipless.gradients.records import TROUBLES, Reading, readings, with_records


def stand_in(values: Any, reading: Reading, number: int, truth: bool) -> Any:
    """One record in place of none: zeros, `number` in whole numbers, `truth` in masks."""

    def make(tensor: Tensor, dim: int) -> Tensor:
        shape = (*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :])
        whole = truth if tensor.dtype is torch.bool else number
        return tensor.new_full(shape, 0 if tensor.is_floating_point() or tensor.is_complex() else whole)

    return with_records(values, reading, make)


class StandIns:
    """One record for every pattern of calling the model, one that the model can be run on: zeros, unless a mask or a length
    must not be zero. It is found by running the model, with the random state kept."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._fills: dict[object, tuple[int, bool]] = {}

    def knows(self, pattern: object) -> bool:
        """Whether it is known which record this pattern of calling takes."""
        return pattern in self._fills

    def inputs(self, module: nn.Module, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        """The inputs with that record; zeros if the model can be run on none, so that its own error shows."""
        reading, pattern = next(readings(inputs, 0), {}), signature(module, inputs)
        if pattern not in self._fills:
            fills = [(0, False), (0, True), (1, True)]
            runs = (fill for fill in fills if self._runs(module, stand_in(inputs, reading, *fill)))
            self._fills[pattern] = next(runs, fills[0])
        args, kwargs = stand_in(inputs, reading, *self._fills[pattern])
        return args, kwargs

    def _runs(self, module: nn.Module, inputs: tuple[Any, Any]) -> bool:
        try:
            with self._hooks.silenced(), random_state_kept(module), unseen_by_checkpoints():
                module(*inputs[0], **inputs[1])
        except TROUBLES:
            return False
        return True
