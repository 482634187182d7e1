"""How `private.step` splits a batch into micro-batches: of a given size, or of the size that a memory limit allows."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from clipless.arguments import whole
from clipless.clipped import LossFunction
from clipless.errors import InvalidArgument, Misuse
from clipless.random_state import random_state_kept
from clipless.sampling.loader import DrawnPart
from clipless.sampling.rows import BatchRows, copied, rows_of

# Private training holds, besides what autograd saves, the gradients of the outputs: at most as much again.
HELD = 2


class Splitter:
    """Splits batches into micro-batches of at most `size` records, or of at most `memory` bytes in forward and backward."""

    def __init__(self, size: int | None, memory: int | None) -> None:
        if size is not None and memory is not None:
            raise InvalidArgument("micro_batch= and memory= both bound the size of a micro-batch. Pass one of them.")
        self._size = None if size is None else whole("micro_batch", size)
        self._memory = None if memory is None else whole("memory", memory)

    @property
    def splits(self) -> bool:
        """Whether batches may be split at all."""
        return self._size is not None or self._memory is not None

    def parts(
        self,
        function: LossFunction,
        model: nn.Module,
        batch: Any,
        drawn: DrawnPart,
        open_part: Callable[[int], None],
        silenced: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[tuple[Any, DrawnPart]]:
        """The micro-batches of a batch, each after `open_part` has been called with its number of records. Inside `silenced`
        the model runs without hooks."""
        records = len(drawn.indices)
        if self._size is None and records:
            with silenced():
                self._size = self._size_within(function, model, _rows(batch, drawn))
        if self._size is None or records <= self._size:
            yield batch, drawn
            return
        rows = _rows(batch, drawn)
        for chosen in torch.arange(records).split(self._size):
            open_part(len(chosen))
            yield rows.chosen(chosen), drawn.chosen(chosen)

    def _size_within(self, function: LossFunction, model: nn.Module, rows: BatchRows) -> int:
        """The number of records that fit: what one more record saves for the backward pass is measured on the first ones."""
        assert self._memory is not None
        few = [saved_bytes(function, model, rows.chosen(torch.arange(n) % rows.records)) for n in (2, 4)]
        each = max((few[1] - few[0]) // 2, 1)
        fixed = max(few[0] - 2 * each, 0)
        return max(1, (self._memory - fixed) // (HELD * each))


def saved_bytes(function: LossFunction, model: nn.Module, batch: Any) -> int:
    """The bytes of the tensors that autograd saves for the backward pass of a function, without the parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), random_state_kept(model), saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = function(model, copied(batch))
    del losses
    return sum(saved.values())


def _rows(batch: Any, drawn: DrawnPart) -> BatchRows:
    rows = rows_of(batch, len(drawn.indices), drawn.dims())
    if rows is None or not rows.certain:
        raise Misuse(
            "private.step cannot split this batch into micro-batches, because it does not see where the records lie in it. "
            "Give private.step what private.loader.microbatches(n) yields for a batch."
        )
    return rows
