"""Memory for large temporary buffers, reused from step to step.

The C library returns large freed buffers to the operating system, and page faults in new ones take longer than writing to
them. So large buffers are kept here, up to `KEPT` bytes in total. A buffer is free again once no tensor uses its memory; it
need not be returned. On other devices torch's allocator does this.
"""

import math
from threading import Lock

import torch
from torch import Tensor

# Buffers of at least this size are kept, and reused for tensors of at least two thirds of their size.
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
    """Free all buffers that are not in use."""
    with _LOCK:
        _BUFFERS[:] = [buffer for buffer in _BUFFERS if not alone(buffer)]


def _new(size: int) -> Tensor:
    """A new buffer. It is kept if there is room; unused ones are freed to make room."""
    for old in [buffer for buffer in _BUFFERS if alone(buffer)]:
        if sum(buffer.nbytes for buffer in _BUFFERS) + size <= KEPT:
            break
        _BUFFERS[:] = [buffer for buffer in _BUFFERS if buffer is not old]
    buffer = torch.empty(size, dtype=torch.uint8)
    if sum(buffer.nbytes for buffer in _BUFFERS) + size <= KEPT:
        _BUFFERS.append(buffer)
    return buffer


def alone(tensor: Tensor) -> bool:
    """Whether no other tensor, in Python, in torch or in another process, uses this one's memory.

    If so, its storage has two references: the tensor's, and the one made here.

    >>> one = torch.zeros(3)
    >>> alone(one), [alone(one) for other in (one[:2], one.detach())]
    (True, [False, False])
    >>> alone(one.share_memory_())
    False
    """
    storage = tensor.untyped_storage()
    count = torch._C._storage_Use_Count(storage._cdata)
    return count == 2 and tensor._use_count() == 1 and not storage.is_shared()  # type: ignore[attr-defined]
