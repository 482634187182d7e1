"""The states of all random generators that a model may draw from: read, compared and restored."""

import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


class RandomState(NamedTuple):
    """The states of torch's generators on every device in use, of Python's and NumPy's, and of `own`, the generators that
    modules keep as attributes."""

    torch: torch.Tensor
    cuda: dict[torch.device, torch.Tensor]
    python: Any
    numpy: Any
    own: list[Any]


def same_random_state(one: RandomState, other: RandomState) -> bool:
    """Whether the global generators are in the same state in both; `own` is not compared."""
    numpy = all(np.array_equal(a, b) for a, b in zip(one.numpy, other.numpy, strict=True))
    cuda = all(torch.equal(one.cuda[device], other.cuda[device]) for device in one.cuda)
    return torch.equal(one.torch, other.torch) and one.python == other.python and numpy and cuda


def nothing_drawn(one: RandomState, other: RandomState) -> bool:
    """Whether all generators are in the same state in both, also those of one's own."""
    return same_random_state(one, other) and all(map(_same, one.own, other.own))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return pickle.dumps(one) == pickle.dumps(other)


def own_generators(modules: Iterable[nn.Module]) -> list[Generator]:
    """The generators that are attributes of these modules."""
    return [value for module in modules for value in vars(module).values() if isinstance(value, Generator)]


def cuda_devices(module: nn.Module) -> set[torch.device]:
    """The CUDA devices on which the module has parameters."""
    return {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}


def random_state_of(devices: Iterable[torch.device], own: Sequence[Generator]) -> RandomState:
    """The present state of the global generators, on these devices, and of `own`."""
    cuda = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
    return RandomState(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state(), list(map(_get, own)))


@contextmanager
def random_state_restored(state: RandomState, own: Sequence[Generator]) -> Iterator[None]:
    """Inside, draw from `state` on; afterwards, from the present state on."""
    before = random_state_of(state.cuda, own)
    set_random_state(state, own)
    try:
        yield
    finally:
        set_random_state(before, own)


@contextmanager
def random_state_kept(module: nn.Module) -> Iterator[None]:
    """Restore all generators that the module may draw from, whatever is drawn inside."""
    own = own_generators(module.modules())
    before = random_state_of(cuda_devices(module), own)
    try:
        yield
    finally:
        set_random_state(before, own)


def set_random_state(state: RandomState, own: Sequence[Generator]) -> None:
    """Restore what `random_state_of` returned for the same generators."""
    torch.set_rng_state(state.torch)
    for device, value in state.cuda.items():
        torch.cuda.set_rng_state(value, device)
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    for generator, value in zip(own, state.own, strict=True):
        _set(generator, value)


def _get(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.bit_generator.state


def _set(generator: Generator, value: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(value)
    elif isinstance(generator, random.Random):
        generator.setstate(value)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(value)
    else:
        generator.bit_generator.state = value
