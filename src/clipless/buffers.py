"""Memory for released gradients that is used again at every step."""

import sys
from collections.abc import Mapping

import torch
from torch import Tensor


class Buffers:
    """One buffer per parameter for its gradient, in at least float32.

    A new large tensor at every step costs more than the noise that is written to it: the operating system hands its pages
    out one by one. So a buffer is lent again, unless somebody still holds the gradient of an earlier step that is in it:
    then that one keeps it and there is a new one.

    >>> parameters, buffers = {"weight": torch.zeros(3)}, Buffers()
    >>> (first,) = buffers.lend(parameters)
    >>> place = first.data_ptr()
    >>> del first
    >>> (second,) = buffers.lend(parameters)
    >>> (third,) = buffers.lend(parameters)
    >>> second.data_ptr() == place, third.data_ptr() == place
    (True, False)
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def lend(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """A buffer for every parameter. Nothing that was read from an earlier loan changes."""
        for name, parameter in parameters.items():
            if name not in self._held or not _free(self._held, name, parameter):
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                self._held[name] = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        return [self._held[name] for name in parameters]


def _free(held: Mapping[str, Tensor], name: str, parameter: Tensor) -> bool:
    """Whether the buffer is held by no one but us and the parameter itself, whose gradient is replaced in any case.

    The object has two references, the mapping's and the call's, and its memory one tensor: a view would be another.
    """
    fits = held[name].shape == parameter.shape and held[name].device == parameter.device
    storage = held[name].untyped_storage()
    return fits and sys.getrefcount(held[name]) == 2 and torch._C._storage_Use_Count(storage._cdata) == 2
