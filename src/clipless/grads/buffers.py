"""Memory for the sums, and for the gradients that noise makes of them, that is used again at every step."""

import sys

import torch
from torch import Tensor

from clipless.grads.pieces.scratch import alone


class Buffers:
    """Buffers for each parameter's sum, in at least float32.

    A new large tensor at every step costs more than the noise that is written to it: the operating system hands its pages
    out one by one. So a buffer is used again, unless somebody holds what was released in it: the parameter itself until
    `zero_grad`, or whoever took its gradient. Then that one keeps it, and there is another.

    >>> parameter, buffers = torch.zeros(3), Buffers()
    >>> first = buffers.take("weight", parameter)
    >>> place = first.data_ptr()
    >>> del first
    >>> second, third = buffers.take("weight", parameter), buffers.take("weight", parameter)
    >>> second.data_ptr() == place, third.data_ptr() == place
    (True, False)
    """

    def __init__(self) -> None:
        self._held: dict[str, list[Tensor]] = {}

    def take(self, name: str, parameter: Tensor) -> Tensor:
        """A buffer for this parameter. Nothing that was read from an earlier one changes."""
        held = self._held.setdefault(name, [])
        for place in range(len(held)):
            if _free(held, place, parameter):
                return held[place]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        fresh = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        self._held[name] = [fresh, *held[:1]]
        return fresh


def _free(held: list[Tensor], place: int, parameter: Tensor) -> bool:
    """Whether nobody but us holds the buffer: whoever does would see a sum without noise in it.

    The object has two references, the list's and the call's. (On an accelerator memory always counts as shared; torch
    itself uses it again there.)
    """
    fits = held[place].shape == parameter.shape and held[place].device == parameter.device
    return fits and sys.getrefcount(held[place]) == 2 and alone(held[place])
