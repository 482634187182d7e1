"""Recurrent layers through time, forward and backward, saving what per-sample gradients need.

Index legend: t position, b record, i in, h hidden (after the projection, if there is one), o hidden before it, g gates
times hidden, l layer times direction. Positions come first in memory, so that one position is one block.

Records of different lengths are sorted, longest first, and `sizes` has the number of records at each position. Beyond its
end a record keeps its state and adds nothing; in the reverse direction it starts from its end.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clipless.gradients.matrix_products import add_product, product
from clipless.gradients.recurrent.cells import Cell, StepGradients, TimeStep, Weights
from clipless.gradients.recurrent.compiled_lstm import suited

HiddenState = tuple[Tensor, ...]  # (h,), for an LSTM (h, c)


class Trace(NamedTuple):
    """What one layer in one direction saves in its forward pass. `hidden` and `cells` include the initial state, at the end
    in the reverse direction; `kept` is the scaled dropout mask on the outputs of the layer below."""

    cell: Cell
    weights: Weights
    x: Tensor  # [t,b,i]
    gates: Tensor  # [t,b,g]
    hidden: Tensor  # [t+1,b,h]
    cells: Tensor | None  # [t+1,b,o]
    extra: Tensor | None  # [t,b,o]
    unprojected: Tensor | None  # [t,b,o]
    reverse: bool
    kept: Tensor | None = None  # [t,b,i]

    @property
    def before(self) -> Tensor:
        """The hidden state before each position, [t,b,h]."""
        return self.hidden[1:] if self.reverse else self.hidden[:-1]

    @property
    def outputs(self) -> Tensor:
        """The hidden state after each position, [t,b,h]."""
        return self.hidden[:-1] if self.reverse else self.hidden[1:]

    @property
    def final(self) -> HiddenState:
        end = 0 if self.reverse else -1
        return (self.hidden[end],) if self.cells is None else (self.hidden[end], self.cells[end])

    @property
    def order(self) -> Sequence[int]:
        """The positions in the order of this direction."""
        return range(len(self.x))[:: -1 if self.reverse else 1]

    def time_steps(self, sizes: list[int]) -> list[TimeStep]:
        """The time step at each position, with the records that reach it."""
        past, future = self.before.unbind(0), self.outputs.unbind(0)
        nothing = [None] * len(past)
        cells = None if self.cells is None else self.cells.unbind(0)
        old, new = (nothing, nothing) if cells is None else (cells[:-1], cells[1:])
        columns = (
            self.gates.unbind(0),
            nothing if self.extra is None else self.extra.unbind(0),
            past,
            new if self.reverse else old,
            future if self.unprojected is None else self.unprojected.unbind(0),
            old if self.reverse else new,
        )
        if min(sizes, default=0) == self.x.shape[1]:
            return [TimeStep(*parts) for parts in zip(*columns, strict=True)]
        return [TimeStep(*(_first(n, part) for part in parts)) for n, *parts in zip(sizes, *columns, strict=True)]


class LayerGradients(NamedTuple):
    """The gradients of one layer in one direction; zero beyond a record's end."""

    gates: Tensor  # [t,b,g]
    hidden_gates: Tensor  # [t,b,g]
    projected: Tensor | None  # [t,b,h]
    state: HiddenState  # [b,h], for an LSTM's c [b,o]; complete only on request


class ForwardResult(NamedTuple):
    """The forward pass of all layers in all directions."""

    traces: list[Trace]
    output: Tensor  # [t,b,h], both directions side by side
    final: list[Tensor]  # [l,b,h], for an LSTM's c [l,b,o]


class BackwardResult(NamedTuple):
    """The backward pass of all layers in all directions."""

    grads_at: list[LayerGradients]
    x: Tensor | None  # [t,b,i]
    state: list[Tensor]  # [l,b,h], for an LSTM's c [l,b,o]; empty unless requested


def forward(
    cell: Cell,
    layers: Sequence[Sequence[Weights]],
    x: Tensor,
    state: HiddenState,
    sizes: list[int],
    dropout: float = 0.0,
) -> ForwardResult:
    """Run x [t,b,i] through layers of one or two directions, from states [l,b,h]. Dropout between layers draws the same
    random numbers as torch's kernel."""
    traces: list[Trace] = []
    kept = None
    for directions in layers:
        if dropout and traces:
            kept = F.dropout(torch.ones(x.shape, dtype=x.dtype, device=x.device), dropout)
            x = x * kept
        for reverse, weights in enumerate(directions):
            start = tuple(part[len(traces)] for part in state)
            traces.append(_forward(cell, weights, x, start, sizes, bool(reverse))._replace(kept=kept))
        outputs = [trace.outputs for trace in traces[-len(directions) :]]
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    final = [torch.stack(states) for states in zip(*(trace.final for trace in traces), strict=True)]
    return ForwardResult(traces, x, final)


def back(
    traces: Sequence[Trace],
    grad: Tensor | None,
    final: HiddenState,
    sizes: list[int],
    *,
    to_input: bool = False,
    to_state: bool = False,
) -> BackwardResult:
    """The gradients of the gates, and on request of the input and the initial states, from those of the output [t,b,h] and
    the final states [l,b,h]. The traces are overwritten."""
    directions = 1 + traces[-1].reverse
    grads_at: list[LayerGradients] = []
    for number in reversed(range(0, len(traces), directions)):
        pair = traces[number : number + directions]
        arriving = [None] * directions if grad is None else grad.chunk(directions, 2)
        ends = [tuple(part[number + k] for part in final) for k in range(directions)]
        found = [_back(*which, sizes, to_state) for which in zip(pair, arriving, ends, strict=True)]
        grads_at[:0] = found
        grad = None
        if number or to_input:
            of_x = [_times(layer_grads.gates, trace.weights.ih) for layer_grads, trace in zip(found, pair, strict=True)]
            grad = of_x[0] if directions == 1 else of_x[0].add_(of_x[1])
            grad = grad if pair[0].kept is None else grad * pair[0].kept
    states = zip(*(layer_grads.state for layer_grads in grads_at), strict=True) if to_state else ()
    return BackwardResult(grads_at, grad, [torch.stack(parts) for parts in states])


def _forward(cell: Cell, weights: Weights, x: Tensor, start: HiddenState, sizes: list[int], reverse: bool) -> Trace:
    t, b, _ = x.shape
    cell = suited(cell, x)
    prepared, rows = cell.prepared(weights), x.flatten(0, 1)
    bias = cell.input_bias(prepared)
    gates = product(rows, prepared.ih.t(), bias)
    width = start[-1].shape[1]  # o
    trace = Trace(
        cell,
        weights,
        x,
        gates.view(t, b, -1),
        hidden=x.new_empty(t + 1, *start[0].shape),
        cells=x.new_empty(t + 1, b, width) if cell.cell_state else None,
        extra=x.new_empty(t, b, width) if cell.extra else None,
        unprojected=None if weights.hr is None else x.new_empty(t, b, width),
        reverse=reverse,
    )
    states = [trace.hidden] if trace.cells is None else [trace.hidden, trace.cells]
    for buffer, value in zip(states, start, strict=True):
        buffer[-1 if reverse else 0] = value
    time_steps = trace.time_steps(sizes)
    for position in trace.order:
        n, past, future = sizes[position], position + reverse, position + (not reverse)
        moment = time_steps[position]
        cell.step(prepared, moment)
        if weights.hr is not None:
            torch.mm(moment.new_h, weights.hr.t(), out=trace.hidden[future, :n])
        if n < b:
            for buffer in states:
                buffer[future, n:] = buffer[past, n:]
            if trace.unprojected is not None:
                trace.unprojected[position, n:] = 0
    return trace


def _back(trace: Trace, grad: Tensor | None, final: HiddenState, sizes: list[int], to_state: bool) -> LayerGradients:
    """Overwrites the gates with their gradients: new memory at every step would cost more than some of the maths."""
    trace = trace._replace(
        gates=trace.gates.data
    )  # keeps the version counter: the hooks, not autograd, refuse a second backward
    b, cell, weights, gates = trace.x.shape[1], trace.cell, trace.weights, trace.gates
    hidden_gates = torch.empty_like(gates) if cell.own_hidden_part else gates
    projected = None if weights.hr is None else torch.empty_like(trace.before)
    state = tuple(part.clone(memory_format=torch.contiguous_format) for part in final)
    time_steps, rows = trace.time_steps(sizes), hidden_gates.unbind(0)
    for position in reversed(trace.order):
        n = sizes[position]
        of_gates, h, *c = (_first(n, part) for part in (rows[position], *state))
        if grad is not None:
            h += grad[position, :n]
        if projected is not None:
            projected[position, :n] = h
        shown = h if weights.hr is None else h @ weights.hr
        cell.back(time_steps[position], StepGradients(of_gates, shown, c[0] if c else None))
        if to_state or position != trace.order[0]:
            add_product(h, of_gates, weights.hh, beta=int(cell.carries))
        for buffer in (gates, hidden_gates, projected):
            if buffer is not None and n < b:
                buffer[position, n:] = 0
    return LayerGradients(gates, hidden_gates, projected, state)


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows [t,b,n] times a matrix."""
    return product(rows.flatten(0, 1), matrix).view(*rows.shape[:2], -1)


def _first(n: int, part: Any) -> Any:
    """The first n records; the tensor itself if these are all, since slicing is a tenth of the time of a small step."""
    return part if part is None or part.shape[0] == n else part[:n]
