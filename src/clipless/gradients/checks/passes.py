"""A forward pass through the model, and how it is run again under the same circumstances."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipless.gradients.moving_buffers import SavedBuffer, buffers_kept, restore, saved_buffers
from clipless.gradients.records import Reading
from clipless.gradients.trees import Dims
from clipless.random_state import Generator, RandomState, random_state_of, random_state_restored
from clipless.torch_internals import pytree


@dataclass(frozen=True)
class Rerun:
    """A module with copies of its inputs, the modes of all its parts, and the random state and autocast of the moment.

    `moving` are buffers that passes may move on, and what was in them.
    """

    module: nn.Module
    inputs: tuple[Any, Any]
    modes: list[tuple[nn.Module, bool]]
    random_state: RandomState
    generators: Sequence[Generator]
    autocast: tuple[str, bool, torch.dtype]
    moving: list[SavedBuffer]

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
            saved_buffers(module.modules()),
        )

    def __call__(
        self,
        inputs: tuple[Any, Any] | None = None,
        evaluate: bool = False,
        run: Callable[..., Any] | None = None,
    ) -> tuple[Any, RandomState]:
        """The module's output, on its own inputs or on others, and the random state it leaves; in its own modes or all in
        evaluation mode. `run` calls the module in another way."""
        args, kwargs = _copied(self.inputs if inputs is None else inputs)
        device, enabled, dtype = self.autocast
        with (
            warnings.catch_warnings(action="ignore"),
            random_state_restored(self.random_state, self.generators),
            _as_before(self.moving),
            _modes([(part, mode and not evaluate) for part, mode in self.modes]),
            # Weights cast without a graph must not be kept for a later pass that needs one, as torch 2.10 would.
            torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=torch.is_grad_enabled()),
        ):
            output = (run or self.module)(*args, **kwargs)
            return output, self.now()

    def now(self) -> RandomState:
        """The present state of what the module may draw from."""
        return random_state_of(self.random_state.cuda, self.generators)


@dataclass(eq=False, slots=True)
class ForwardPass:
    """A forward pass through the outermost module.

    `anchor` is the leaf that all taps of the pass hang on, so that a backward pass can be cut down to them. `steps` are
    the calls that it went through, each with the one before it and the ranks of its inputs. `reading` says where the
    `records` lie in its inputs; `square` that in every pass so far as many numbers lay along another dimension. `routed` is
    set if rows somewhere are not the records, so that seeds must tell whose they are.

    Of a checked pass, `outputs` are the outputs before the tap on them, `tapped` those behind it, at these `places`
    among its floating-point tensors; `out_dims` says where their records lie, `values` is a sketch of them, and `drawn`
    the random state at the end. `grads` are the gradients that arrived there, and `totals` every parameter's gradient
    without clipping, summed over the records that are `judged`, [b], or over all if that is None. `hidden` is set if no
    output with a gradient was found, `loss_inside` if the module returned the loss of the whole batch, `averaged` if
    that is a mean.
    """

    name: str
    records: int
    reading: Reading
    square: bool = False
    steps: set[object] = field(default_factory=set)
    last: str = ""
    rerun: Rerun | None = None
    anchor: Tensor = field(default_factory=partial(torch.empty, (), requires_grad=True))
    outputs: tuple[Tensor, ...] = ()
    tapped: tuple[Tensor, ...] = ()
    places: list[int] = field(default_factory=list)
    out_dims: Dims = ()
    values: list[Tensor] = field(default_factory=list)
    drawn: RandomState | None = None
    grads: tuple[Tensor | None, ...] | None = None
    totals: dict[str, Tensor] = field(default_factory=dict)
    judged: Tensor | None = None
    routed: bool = False
    hidden: bool = False
    loss_inside: bool = False
    averaged: bool = False


def _copied(inputs: tuple[Any, Any]) -> tuple[Any, Any]:
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, inputs)


@contextmanager
def _as_before(saved: list[SavedBuffer]) -> Iterator[None]:
    with buffers_kept({buffer.owner: None for buffer in saved}):
        restore(saved)
        yield


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
