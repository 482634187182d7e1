"""Memory for the sums without noise. It is never handed out: what is released is written to tensors of its own."""

import torch
from torch import Tensor


class Buffers:
    """One buffer for each parameter's sum, in at least float32, used again at every step.

    A new large tensor at every step would cost more than the noise: the operating system hands its pages out one by one.

    >>> parameter, buffers = torch.zeros(3), Buffers()
    >>> place = buffers.take("weight", parameter).data_ptr()
    >>> buffers.take("weight", parameter).data_ptr() == place, buffers.take("bias", parameter).data_ptr() == place
    (True, False)
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, parameter: Tensor) -> Tensor:
        """The buffer of this parameter, with whatever is in it."""
        held = self._held.get(name)
        if held is None or held.shape != parameter.shape or held.device != parameter.device:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            held = self._held[name] = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        return held
