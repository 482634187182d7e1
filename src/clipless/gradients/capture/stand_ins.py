"""An empty batch is run on one made-up record."""

from typing import Any

import torch
from torch import Tensor, nn

from clipless.gradients.capture.frames import unseen_by_checkpoints
from clipless.gradients.capture.hooks import Hooks
from clipless.gradients.capture.layout import signature
from clipless.gradients.records import TROUBLES, Reading, readings, with_records
from clipless.random_state import random_state_kept


def stand_in(values: Any, reading: Reading, number: int, truth: bool) -> Any:
    """The inputs with one record instead of none: zeros, `number` in whole numbers, `truth` in masks."""

    def make(tensor: Tensor, dim: int) -> Tensor:
        shape = (*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :])
        whole = truth if tensor.dtype is torch.bool else number
        return tensor.new_full(shape, 0 if tensor.is_floating_point() or tensor.is_complex() else whole)

    return with_records(values, reading, make)


class StandIns:
    """For each pattern of calling the model, a record that the model runs on: zeros, unless a mask or a length must not be
    zero. It is found by running the model; the random state is restored."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._fills: dict[object, tuple[int, bool]] = {}

    def inputs(self, module: nn.Module, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        """The inputs with that record. If the model runs on none, zeros, so that the user sees the model's own error."""
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
