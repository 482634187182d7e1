"""Memory for large buffers that live for a moment, used again from step to step.

What is freed at the end of a step, the C library gives back to the operating system, which hands it out anew page by page:
that takes longer than writing to it. So large buffers are kept here, up to `KEPT` bytes in all. A buffer is free when no
tensor lies in it any more; nobody has to say so. On other devices torch does this itself.
"""

import math
from threading import Lock

import torch
from torch import Tensor

# Buffers from this size on are kept, and given to whoever needs at least two thirds of one.
LARGE = 2**20
KEPT = 64 * 2**20
SLACK = 1.5

_BUFFERS: list[Tensor] = []
_LOCK = Lock()


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor of this shape, of the type and on the device of another.

    >>> forget()
    >>> first = empty((1024, 1024), torch.zeros(()))
    >>> place = first.data_ptr()
    >>> second = empty((1024, 1024), torch.zeros(()))
    >>> del first
    >>> third = empty((1000, 1024), torch.zeros(()))
    >>> second.data_ptr() == place, third.data_ptr() == place
    (False, True)
    >>> forget()
    """
    size = math.prod(shape) * like.element_size()
    if size < LARGE or like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    with _LOCK:
        fitting = [buffer for buffer in _BUFFERS if size <= buffer.nbytes <= SLACK * size and alone(buffer)]
        buffer = min(fitting, key=lambda buffer: buffer.nbytes) if fitting else _new(size)
        return buffer[:size].view(like.dtype).view(shape)


def forget() -> None:
    """Give everything back that is not in use."""
    with _LOCK:
        _BUFFERS[:] = [buffer for buffer in _BUFFERS if not alone(buffer)]


def _new(size: int) -> Tensor:
    """A new buffer, kept if there is room for it, for which unused ones have to go."""
    for old in [buffer for buffer in _BUFFERS if alone(buffer)]:
        if sum(buffer.nbytes for buffer in _BUFFERS) + size <= KEPT:
            break
        _BUFFERS[:] = [buffer for buffer in _BUFFERS if buffer is not old]
    buffer = torch.empty(size, dtype=torch.uint8)
    if sum(buffer.nbytes for buffer in _BUFFERS) + size <= KEPT:
        _BUFFERS.append(buffer)
    return buffer


def alone(tensor: Tensor) -> bool:
    """Whether no other tensor, in Python, in torch or in another process, lies in this one's memory.

    Its storage has two references then: the tensor's and the one made here.

    >>> one = torch.zeros(3)
    >>> alone(one), [alone(one) for other in (one[:2], one.detach())]
    (True, [False, False])
    >>> alone(one.share_memory_())
    False
    """
    storage = tensor.untyped_storage()
    count = torch._C._storage_Use_Count(storage._cdata)
    return count == 2 and tensor._use_count() == 1 and not storage.is_shared()  # type: ignore[attr-defined]
