"""One call of the outermost module, and how it is run again under the circumstances that it had."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from clipless.grads.layout import Dims, Reading
from clipless.grads.randomness import Generator, RandomState, random_state_of, random_state_restored
from clipless.grads.watch import spectral_buffers


@dataclass(frozen=True)
class Rerun:
    """A module with copies of its inputs, the modes of all its parts, and the random state and autocast of the moment.

    `iterates` are buffers that every pass moves on, without a look at the records, and what was in them.
    """

    module: nn.Module
    inputs: tuple[Any, Any]
    modes: list[tuple[nn.Module, bool]]
    random_state: RandomState
    generators: Sequence[Generator]
    autocast: tuple[str, bool, torch.dtype]
    iterates: list[tuple[Tensor, Tensor]]

    @staticmethod
    def of(module: nn.Module, inputs: tuple[Any, Any], generators: Sequence[Generator]) -> "Rerun":
        devices = {parameter.device for parameter in module.parameters()}
        kind = next((device.type for device in devices), "cpu")
        return Rerun(
            module,
            _copied(inputs),
            [(part, part.training) for part in module.modules()],
            random_state_of(devices, generators),
            generators,
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            [(buffer, buffer.clone()) for buffer in spectral_buffers(module)],
        )

    def __call__(self, inputs: tuple[Any, Any] | None = None, evaluate: bool = False) -> tuple[Any, RandomState]:
        """The module's output, on its own inputs or on others, and the random state it leaves; in its own modes or all in
        evaluation mode."""
        args, kwargs = _copied(self.inputs if inputs is None else inputs)
        device, enabled, dtype = self.autocast
        with (
            warnings.catch_warnings(action="ignore"),
            random_state_restored(self.random_state, self.generators),
            _contents(self.iterates),
            _modes([(part, mode and not evaluate) for part, mode in self.modes]),
            torch.autocast(device, dtype=dtype, enabled=enabled),
        ):
            output = self.module(*args, **kwargs)
            return output, self.now()

    def now(self) -> RandomState:
        """The present state of what the module may draw from."""
        return random_state_of(self.random_state.cuda, self.generators)


@dataclass
class Entry:
    """A forward pass through the outermost module.

    `anchor` is the leaf that all taps of the pass hang on, so that a backward pass can be cut down to them. `steps` are
    the calls it went through, each with the one before it and its kinds of shapes; `reading` says where the `records` lie in
    its inputs, and `square` that as many numbers lie along another dimension, in every pass so far.

    Of a pass that is checked, `outputs` are its outputs before the tap on them, at these `places` among its floating-point
    tensors; `out_dims` says where their records lie, `values` is a sketch of what they were, and `drawn` the random state
    then. `grads` are the gradients that arrived there, and `totals` the sums over the records of every parameter's gradient,
    without clipping, that these led to. `hidden` is set if no output was found that has a gradient,
    `loss_inside` is set if the module returned the loss of the whole
    batch, `averaged` if that is a mean.
    """

    name: str
    records: int
    reading: Reading
    square: bool = False
    steps: set[object] = field(default_factory=set)
    last: str = ""
    rerun: Rerun | None = None
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    outputs: tuple[Tensor, ...] = ()
    places: list[int] = field(default_factory=list)
    out_dims: Dims = ()
    values: list[Tensor] = field(default_factory=list)
    drawn: RandomState | None = None
    grads: tuple[Tensor | None, ...] | None = None
    totals: dict[str, Tensor] = field(default_factory=dict)
    hidden: bool = False
    loss_inside: bool = False
    averaged: bool = False


def _copied(inputs: tuple[Any, Any]) -> tuple[Any, Any]:
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, inputs)


@contextmanager
def _contents(values: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    now = [(buffer, buffer.clone()) for buffer, _ in values]
    for buffer, value in values:
        buffer.copy_(value)
    try:
        yield
    finally:
        for buffer, value in now:
            buffer.copy_(value)


@contextmanager
def _modes(modes: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    now = [(part, part.training) for part, _ in modes]
    for part, mode in modes:
        part.training = mode
    try:
        yield
    finally:
        for part, mode in now:
            part.training = mode
