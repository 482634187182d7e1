"""What stands for the records of an empty batch."""

from typing import Any

import torch
from torch import Tensor, nn

from clipless.grads.frames import unseen_by_checkpoints
from clipless.grads.layout import Reading, random_state_kept, readings, signature, with_records
from clipless.grads.receiver import Receiver
from clipless.grads.ways import TROUBLES


def stand_in(values: Any, reading: Reading, number: int, truth: bool) -> Any:
    """One record in place of none: zeros, `number` in whole numbers, `truth` in masks."""

    def make(tensor: Tensor, dim: int) -> Tensor:
        shape = (*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :])
        whole = truth if tensor.dtype is torch.bool else number
        return tensor.new_full(shape, 0 if tensor.is_floating_point() or tensor.is_complex() else whole)

    return with_records(values, reading, make)


class StandIns:
    """A record for every way in which the model is called on none, one that it can be run on: zeros, unless a mask or a
    length must not be zero. It is found by running the model, with the random state kept."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._fills: dict[object, tuple[int, bool]] = {}

    def given(self, module: nn.Module, inputs: tuple[Any, Any]) -> Any:
        """The inputs with that record; zeros if the model takes none, so that its own error shows."""
        reading, how = next(readings(inputs, 0), {}), signature(module, inputs)
        if how not in self._fills:
            fills = [(0, False), (0, True), (1, True)]
            runs = (fill for fill in fills if self._runs(module, stand_in(inputs, reading, *fill)))
            self._fills[how] = next(runs, fills[0])
        return stand_in(inputs, reading, *self._fills[how])

    def _runs(self, module: nn.Module, inputs: tuple[Any, Any]) -> bool:
        try:
            with self._receiver.plainly(), random_state_kept(module), unseen_by_checkpoints():
                module(*inputs[0], **inputs[1])
        except TROUBLES:
            return False
        return True
