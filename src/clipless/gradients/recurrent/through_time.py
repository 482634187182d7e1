"""One layer in one direction: what it saves, and its way through time and back, one time step after the other.

Index legend: t position, b record, i in, h hidden (after the projection, if there is one), o hidden before it, g gates
times hidden. Positions come first in memory, so that one position is one block.

`sizes` has the number of records at each position: records are sorted, longest first. Beyond its end a record keeps its
state and adds nothing; in the reverse direction it starts from its end.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clipless.gradients.recurrent.cells import Cell, StepGradients, TimeStep, Weights
from clipless.gradients.recurrent.matrix_products import add_product
from clipless.native.lstm import Passes, SavedSteps

HiddenState = tuple[Tensor, ...]  # (h,), for an LSTM (h, c)


class Trace(NamedTuple):
    """What one layer in one direction saves in its forward pass. `hidden` and `cells` include the initial state, at the end
    in the reverse direction; `kept` is the scaled dropout mask on the outputs of the layer below. `passes` are the compiled
    ones, if the forward pass was one of them."""

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
    passes: Passes | None = None

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

    def saved_steps(self, sizes: Sequence[int]) -> SavedSteps:
        """What it saves as the compiled passes take it."""
        assert self.cells is not None
        assert self.extra is not None
        return SavedSteps(self.gates, self.hidden, self.cells, self.extra, sizes, self.reverse)

    def time_steps(self, sizes: Sequence[int]) -> list[TimeStep]:
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


def forward_by_steps(trace: Trace, weights: Weights, sizes: Sequence[int]) -> None:
    """From initial states and the input's part of the gates to what the trace saves; with the cell's prepared weights."""
    states = [trace.hidden] if trace.cells is None else [trace.hidden, trace.cells]
    time_steps, b = trace.time_steps(sizes), trace.x.shape[1]
    for position in trace.order:
        n, past, future = sizes[position], position + trace.reverse, position + (not trace.reverse)
        moment = time_steps[position]
        trace.cell.step(weights, moment)
        if weights.hr is not None:
            torch.mm(moment.new_h, weights.hr.t(), out=trace.hidden[future, :n])
        if n < b:
            for buffer in states:
                buffer[future, n:] = buffer[past, n:]
            if trace.unprojected is not None:
                trace.unprojected[position, n:] = 0


def back_by_steps(
    trace: Trace, grad: Tensor | None, state: HiddenState, sizes: Sequence[int], to_state: bool
) -> LayerGradients:
    """From the gradients of the output [t,b,h] and of the final states, which are overwritten, as the gates are: new memory
    at every step would cost more than some of the maths."""
    b, cell, weights, gates = trace.x.shape[1], trace.cell, trace.weights, trace.gates
    hidden_gates = torch.empty_like(gates) if cell.own_hidden_part else gates
    projected = None if weights.hr is None else torch.empty_like(trace.before)
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


def _first(n: int, part: Any) -> Any:
    """The first n records; the tensor itself if these are all, since slicing is a tenth of the time of a small step."""
    return part if part is None or part.shape[0] == n else part[:n]
