"""Buffers that a forward pass may move on, since what it writes there does not come from the records: the vectors of
spectral norm, which the weights alone determine, and counters of calls."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from clipless.torch_internals import OldSpectralNorm, SpectralNorm


def power_iteration_buffers(module: nn.Module) -> set[str]:
    """The names of the buffers that the power iteration of spectral norm moves on in the module."""
    if isinstance(module, SpectralNorm):
        return set(module._buffers)
    norms = [hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, OldSpectralNorm)]
    return {f"{name}_{vector}" for name in norms for vector in "uv"}


def may_count(buffer: Tensor | None) -> bool:
    """Whether it is a single number, as a counter is."""
    return buffer is not None and buffer.numel() == 1


class SavedBuffer(NamedTuple):
    """A buffer of a module that passes may move on, and what was in it."""

    owner: nn.Module
    name: str
    buffer: Tensor
    content: Tensor


def saved_buffers(modules: Iterable[nn.Module]) -> list[SavedBuffer]:
    """All buffers of these modules that passes may move on, with what is in them now."""
    found = []
    for module in modules:
        if not module._buffers:
            continue
        moved = power_iteration_buffers(module)
        for name, buffer in module._buffers.items():
            if buffer is not None and (name in moved or may_count(buffer)):
                found.append(SavedBuffer(module, name, buffer, buffer.detach().clone()))
    return found


@contextmanager
def buffers_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards, these modules' buffers are what they were, as far as passes may move them on."""
    saved = saved_buffers(modules)
    try:
        yield
    finally:
        restore(saved)


def restore(saved: Iterable[SavedBuffer]) -> None:
    """Put these buffers back, with what was in them; one that has not changed is not written to."""
    with torch.no_grad():
        for owner, name, buffer, content in saved:
            if owner._buffers.get(name) is not buffer:
                owner._buffers[name] = buffer
            if not torch.equal(buffer, content):
                buffer.copy_(content)
