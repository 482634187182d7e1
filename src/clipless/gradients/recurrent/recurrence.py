"""Recurrent layers in all directions, forward and backward, saving what per-sample gradients need.

Index legend: t position, b record, i in, h hidden (after the projection, if there is one), o hidden before it, g gates
times hidden, l layer times direction. `sizes` has the number of records at each position, as in `through_time.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clipless.gradients.recurrent.cells import Cell, Weights
from clipless.gradients.recurrent.compiled_lstm import suited
from clipless.gradients.recurrent.matrix_products import product
from clipless.gradients.recurrent.through_time import (
    HiddenState,
    LayerGradients,
    Trace,
    back_by_steps,
    forward_by_steps,
)


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
    passes = suited(cell, weights, x)
    prepared = weights if passes else cell.prepared(weights)
    gates = product(x.flatten(0, 1), prepared.ih.t(), cell.input_bias(prepared))
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
        passes=passes,
    )
    states = [trace.hidden] if trace.cells is None else [trace.hidden, trace.cells]
    for buffer, value in zip(states, start, strict=True):
        buffer[-1 if reverse else 0] = value
    if passes is not None:
        passes.forward(trace.saved_steps(sizes), weights.hh.contiguous())
    else:
        forward_by_steps(trace, prepared, sizes)
    return trace


def _back(trace: Trace, grad: Tensor | None, final: HiddenState, sizes: list[int], to_state: bool) -> LayerGradients:
    """Overwrites the gates with their gradients."""
    # This keeps the version counter: the hooks, not autograd, refuse a second backward.
    trace = trace._replace(gates=trace.gates.data)
    state = tuple(part.clone(memory_format=torch.contiguous_format) for part in final)
    if trace.passes is None:
        return back_by_steps(trace, grad, state, sizes, to_state)
    trace.passes.back(trace.saved_steps(sizes), trace.weights.hh.contiguous(), grad, state, to_state)
    return LayerGradients(trace.gates, trace.gates, None, state)


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows [t,b,n] times a matrix."""
    return product(rows.flatten(0, 1), matrix).view(*rows.shape[:2], -1)
