"""Recurrent layers computed in place of torch's kernel, which does not save what per-sample gradients need.

While the layer runs on an open micro-batch, the recurrence is computed here, once, and what the layer rule needs is saved.
In the backward pass the rule goes back through time and passes the gradients of the layer's input to autograd. No module
is wrapped: one weight in the layer's own list is replaced by an `Intercept`, a tensor subclass with the same value, and
torch dispatches the call of the kernel to that class.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clipless.errors import UnsupportedModule
from clipless.gradients.recurrent.cells import CELLS, Cell, Weights
from clipless.gradients.recurrent.recurrence import forward
from clipless.gradients.recurrent.sequences import Sequences
from clipless.gradients.recurrent.through_time import HiddenState, Trace
from clipless.torch_internals import RECURRENT_KERNELS, pytree

KERNELS: dict[Any, Cell] = {getattr(RECURRENT_KERNELS, name): cell for name, cell in CELLS.items()}


class InputGradients:
    """The gradients of the layer's input and initial states, computed by its rule before autograd needs them."""

    def __init__(self, wanted: Sequence[bool]) -> None:
        self.wanted = tuple(wanted)
        self.grads: tuple[Tensor | None, ...] | None = None


class SavedPass(NamedTuple):
    """What a takeover saves in the forward pass for the layer rule."""

    traces: list[Trace]
    input_grads: InputGradients

    def copied(self) -> "SavedPass":
        """A copy, for a rule that overwrites it when another rule is still to follow."""
        return SavedPass([trace._replace(gates=trace.gates.clone()) for trace in self.traces], self.input_grads)


class Takeover:
    """Answers the calls of a layer's kernel, from now until `end`. `kept` is what it saved; None before the first call, or
    if the call was left to the kernel: under autocast, in half precision, with dropout between layers on packed sequences,
    or on shapes that do not fit.
    """

    def __init__(self, layer: nn.RNNBase) -> None:
        self.kept: SavedPass | None = None
        self._weights: list[Any] = layer._flat_weights
        last: Tensor = self._weights[-1]
        self._last = last.takeover.last if isinstance(last, Intercept) else last
        self._weights[-1] = Intercept.on(self)

    @property
    def last(self) -> Tensor:
        """The weight that the intercept replaces."""
        return self._last

    def end(self) -> None:
        """Restore the weight. A second call does nothing."""
        if isinstance(self._weights[-1], Intercept):
            self._weights[-1] = self._last

    def answer(self, kernel: Any, args: tuple[Any, ...]) -> Any:
        call = KernelCall.of(KERNELS[kernel], args)
        if not call.fits():
            return kernel(*args)
        return Recurrence.apply(self, call, call.data, *call.state)  # type: ignore[no-untyped-call]


def take_over(module: nn.Module) -> Takeover | None:
    """The takeover of a recurrent layer's kernel; None for any other module."""
    return Takeover(module) if isinstance(module, nn.RNNBase) else None


class Intercept(Tensor):
    """Replaces one weight of a layer, so that torch dispatches the layer's calls with it to the takeover."""

    takeover: Takeover

    @staticmethod
    def on(takeover: Takeover) -> "Intercept":
        intercept = Tensor._make_subclass(Intercept, takeover.last.detach())
        intercept.takeover = takeover
        return intercept

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        intercept = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.takeover.last if isinstance(leaf, cls) else leaf, (args, kwargs or {})
        )
        return func(*args, **kwargs) if func not in KERNELS or kwargs else intercept.takeover.answer(func, args)


class KernelCall(NamedTuple):
    """The arguments of a kernel call."""

    cell: Cell
    data: Tensor
    sequences: Sequences
    state: HiddenState
    weights: list[Tensor]
    bias: bool
    depth: int
    dropout: float
    bidirectional: bool

    @staticmethod
    def of(cell: Cell, args: tuple[Any, ...]) -> "KernelCall":
        """The kernels take (data, state, weights, bias, layers, dropout, training, two-way, batch first), or, packed,
        (data, batch sizes, state, ...) without batch first."""
        packed = isinstance(args[3], list | tuple)
        data, sizes, rest = (args[0], args[1], args[2:]) if packed else (args[0], None, args[1:])
        state, weights, bias, depth, dropout, training, bidirectional = rest[:7]
        sequences = Sequences(not packed and rest[7], sizes)
        states = (state,) if isinstance(state, Tensor) else tuple(state)
        return KernelCall(
            cell, data, sequences, states, list(weights), bias, depth, dropout if training else 0.0, bidirectional
        )

    def fits(self) -> bool:
        tensors = [self.data, *self.state, *self.weights]
        alike = all(t.dtype == self.data.dtype and type(t) in (Tensor, nn.Parameter) for t in tensors)
        return (
            alike
            and self.data.dtype in (torch.float32, torch.float64)
            and not torch.is_autocast_enabled(self.data.device.type)
            and (self.dropout == 0 or self.depth == 1 or self.sequences.batch_sizes is None)
            and self.data.numel() > 0
            and self._starts_fit()
        )

    def _starts_fit(self) -> bool:
        rows, sizes = self.depth * (1 + self.bidirectional), self.sequences.batch_sizes
        records = self.data.shape[not self.sequences.batch_first] if sizes is None else int(sizes[0])
        return self.data.dim() == (3 if sizes is None else 2) and all(
            s.shape[:2] == (rows, records) for s in self.state
        )


def layers_of(flat: Sequence[Tensor], bias: bool, depth: int, bidirectional: bool) -> list[list[Weights]]:
    """A layer's flat list of weights, by layer and direction."""
    directions = 1 + bidirectional
    each = len(flat) // (depth * directions)
    named = [_weights(flat[k : k + each], bias) for k in range(0, len(flat), each)]
    return [named[k : k + directions] for k in range(0, len(named), directions)]


def _weights(group: Sequence[Tensor], bias: bool) -> Weights:
    ih, hh, *rest = group
    bias_ih, bias_hh = rest[:2] if bias else (None, None)
    projection = rest[2 * bias :]
    return Weights(ih, hh, bias_ih, bias_hh, projection[0] if projection else None)


class Recurrence(torch.autograd.Function):
    """The recurrence in place of the kernel. Outputs are copies of what is saved, so that they may be changed in place."""

    @staticmethod
    def forward(ctx: Any, takeover: Takeover, call: KernelCall, data: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        x = call.sequences.timed(data).contiguous()
        layers = layers_of(call.weights, call.bias, call.depth, call.bidirectional)
        result = forward(call.cell, layers, x, state, call.sequences.sizes(x), call.dropout)
        ctx.input_grads = InputGradients(ctx.needs_input_grad[2:])
        ctx.set_materialize_grads(False)
        takeover.kept = SavedPass(result.traces, ctx.input_grads)
        return call.sequences.given(result.output).clone(memory_format=torch.contiguous_format), *result.final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if ctx.input_grads.grads is None:
            raise UnsupportedModule(
                "the output of a recurrent layer was used before clipless saw it, so per-sample gradients cannot be "
                "computed. Register forward hooks on the layer after make_private, or none."
            )
        found, ctx.input_grads.grads = ctx.input_grads.grads, None
        return None, None, *found
