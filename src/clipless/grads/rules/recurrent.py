"""Recurrent layers and cells, unrolled again in plain operations, which gives the gradients at their gates.

Index legend: b record, t position, i in, h hidden (after the projection, if there is one), o hidden before it, g gates
times hidden, l layer times direction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from clipless.errors import UnsupportedModule
from clipless.grads.pieces import Instantiated, OuterProducts, Piece
from clipless.grads.rules.use import Use, at_least_float32, register

Recurrent = nn.RNNBase | nn.RNNCellBase
State = tuple[Tensor, ...]  # (h,), for an LSTM (h, c)
Step = Callable[[Tensor, Tensor, State], State]


@register(nn.RNN, nn.LSTM, nn.GRU)
def recurrent(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Piece]:
    """Any number of layers, both directions, projections, given initial states, padded or packed sequences.

    In a packed batch a record keeps its state beyond its end and adds nothing there; in the reverse direction it starts
    from its end.
    """
    module = use.module
    assert isinstance(module, nn.RNNBase)
    source, given = _arguments(*use.args, **use.kwargs)
    _refuse(use, module, source)
    x, alive = _padded(source, batch_first=module.batch_first)  # [b,t,i] [b,t]
    grad, _ = _padded(_like(source, grads[0]), batch_first=True)  # [b,t,h]
    initial = [state.unbind(0) for state in given]  # l × [b,h]
    directions = ("", "_reverse") if module.bidirectional else ("",)
    runs: list[Run] = []
    with torch.enable_grad():
        for layer in range(module.num_layers):
            for direction in directions:
                state = tuple(states[len(runs)] for states in initial)
                runs.append(unrolled(module, f"_l{layer}{direction}", x, state, alive, bool(direction)))
            x = torch.cat([torch.stack(run.outputs, 1) for run in runs[-len(directions) :]], 2)
        finals = [torch.stack(states, 1) for states in zip(*(run.final for run in runs), strict=True)]  # [b,l,h]
    return _pieces(use, runs, [x, *finals], [grad, *grads[1:]])


@register(nn.RNNCell, nn.LSTMCell, nn.GRUCell)
def recurrent_cell(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Piece]:
    """One position. The engine combines the pieces of the calls for all of them."""
    module = use.module
    assert isinstance(module, nn.RNNCellBase)
    x, given = _arguments(*use.args, **use.kwargs)
    if x.dim() != 2 or (_dim_of(use, x), *use.out_dims) != (0, *[0] * len(grads)):
        raise UnsupportedModule(f"{module} needs an input of shape (B, features), with one row per record.")
    with torch.enable_grad():
        run = unrolled(module, "", at_least_float32(x).unsqueeze(1), given)
    return _pieces(use, [run], run.final, grads)


@dataclass
class Run:
    """One layer in one direction, unrolled; lists go by position. What is `watched` has the gradients for the pieces."""

    suffix: str
    acts: Tensor  # [b,t,i]
    gates: Tensor  # [b,t,g], the input's share of them
    final: State = ()  # [b,h], for an LSTM's c [b,o]
    outputs: list[Tensor] = field(default_factory=list)  # t × [b,h]
    hidden: list[Tensor] = field(default_factory=list)  # t × [b,h], the state before the position
    hidden_gates: list[Tensor] = field(default_factory=list)  # t × [b,g], the state's share, for a GRU
    unprojected: list[Tensor] = field(default_factory=list)  # t × [b,o]
    projected: list[Tensor] = field(default_factory=list)  # t × [b,h]

    @property
    def watched(self) -> list[Tensor]:
        return [self.gates, *self.hidden_gates, *self.projected]

    def pieces(self, grads: Sequence[Tensor]) -> dict[str, Piece]:
        """A piece for each parameter, from the gradients of all that is watched."""
        of_gates, n = grads[0], 1 + len(self.hidden_gates)
        of_hidden_gates = torch.stack(list(grads[1:n]), 1) if self.hidden_gates else of_gates  # [b,t,g]
        pieces: dict[str, Piece] = {
            "weight_ih": OuterProducts(self.acts.detach(), of_gates),
            "weight_hh": OuterProducts(torch.stack(self.hidden, 1), of_hidden_gates),
            "bias_ih": Instantiated(of_gates.sum(1)),
            "bias_hh": Instantiated(of_hidden_gates.sum(1)),
        }
        if self.projected:
            pieces["weight_hr"] = OuterProducts(torch.stack(self.unprojected, 1), torch.stack(list(grads[n:]), 1))
        return {name + self.suffix: piece for name, piece in pieces.items()}


def unrolled(
    module: Recurrent, suffix: str, x: Tensor, state: State, alive: Tensor | None = None, backwards: bool = False
) -> Run:
    """Run one layer in one direction on x [b,t,i], from zeros unless a state is given."""

    def parameter(name: str) -> Tensor | None:
        value = getattr(module, name + suffix, None)
        return None if value is None else value.detach().to(x.dtype)

    weight_ih, weight_hh, projection = parameter("weight_ih"), parameter("weight_hh"), parameter("weight_hr")
    bias_ih, bias_hh = parameter("bias_ih"), parameter("bias_hh")
    assert weight_ih is not None
    assert weight_hh is not None
    step = _step_of(module)
    widths = [weight_hh.shape[1], module.hidden_size][: 2 if step is _lstm else 1]
    state = tuple(part.to(x.dtype) for part in state) or tuple(x.new_zeros(len(x), width) for width in widths)
    run = Run(suffix, x, _watched(F.linear(x, weight_ih, bias_ih)))
    gates = run.gates.unbind(1)
    for t in reversed(range(len(gates))) if backwards else range(len(gates)):
        run.hidden.append(state[0])
        hidden_gates = F.linear(state[0], weight_hh, bias_hh)
        if step is _gru:
            run.hidden_gates.append(_watched(hidden_gates))
        new = step(gates[t], hidden_gates, state)
        if projection is not None:
            run.unprojected.append(new[0])
            new = F.linear(new[0], projection), *new[1:]
            run.projected.append(new[0])
        if alive is not None:
            new = tuple(torch.where(alive[:, t, None], now, then) for now, then in zip(new, state, strict=True))
        state = new
        run.outputs.append(state[0])
    if backwards:
        for by_step in (run.outputs, run.hidden, run.hidden_gates, run.unprojected, run.projected):
            by_step.reverse()
    run.final = state
    return run


def _step_of(module: Recurrent) -> Step:
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return _lstm
    if isinstance(module, nn.GRU | nn.GRUCell):
        return _gru
    assert isinstance(module, nn.RNN | nn.RNNCell)
    return _tanh if module.nonlinearity == "tanh" else _relu


def _tanh(gates: Tensor, hidden_gates: Tensor, state: State) -> State:
    return ((gates + hidden_gates).tanh(),)


def _relu(gates: Tensor, hidden_gates: Tensor, state: State) -> State:
    return ((gates + hidden_gates).relu(),)


def _lstm(gates: Tensor, hidden_gates: Tensor, state: State) -> State:
    write, forget, value, show = (gates + hidden_gates).chunk(4, 1)
    c = forget.sigmoid() * state[1] + write.sigmoid() * value.tanh()
    return show.sigmoid() * c.tanh(), c


def _gru(gates: Tensor, hidden_gates: Tensor, state: State) -> State:
    """The reset gate multiplies the hidden state's share of the new value, so the two shares have other gradients."""
    (reset, update, value), (h_reset, h_update, h_value) = gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    new = (value + (reset + h_reset).sigmoid() * h_value).tanh()
    return (new + (update + h_update).sigmoid() * (state[0] - new),)


def _watched(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else tensor.requires_grad_()


def _pieces(use: Use, runs: list[Run], outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> dict[str, Piece]:
    watched = [tensor for run in runs for tensor in run.watched]
    arrived = [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)]
    found = iter(torch.autograd.grad(outputs, watched, arrived))
    pieces: dict[str, Piece] = {}
    for run in runs:
        pieces |= run.pieces([next(found) for _ in run.watched])
    return {name: pieces[name] for name in use.wanted}


def _arguments(input: Any, hx: Any = None) -> tuple[Any, State]:
    """The input and the initial states, under the names that torch gives them; no states if none were given."""
    return input, () if hx is None else (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _padded(source: Tensor | PackedSequence, batch_first: bool) -> tuple[Tensor, Tensor | None]:
    """The sequences as [b,t,i] in at least float32, and where there is something in them if they were packed."""
    if not isinstance(source, PackedSequence):
        return at_least_float32(source if batch_first else source.movedim(1, 0)), None
    padded, lengths = pad_packed_sequence(source, batch_first=True)
    positions = torch.arange(padded.shape[1], device=padded.device)
    return at_least_float32(padded), positions < lengths.to(padded.device).unsqueeze(1)


def _like(source: Tensor | PackedSequence, data: Tensor) -> Tensor | PackedSequence:
    """The data packed like the source, if that is packed."""
    if not isinstance(source, PackedSequence):
        return data
    return PackedSequence(data, source.batch_sizes, source.sorted_indices, source.unsorted_indices)


def _dim_of(use: Use, tensor: Tensor) -> int | None:
    """Along which dimension the records lie in this tensor of the input."""
    tensors = [leaf for leaf in pytree.tree_leaves((use.args, dict(use.kwargs))) if isinstance(leaf, Tensor)]
    return next(dim for leaf, dim in zip(tensors, use.dims, strict=True) if leaf is tensor)


def _refuse(use: Use, module: nn.RNNBase, source: Tensor | PackedSequence) -> None:
    if module.dropout > 0 and module.training and module.num_layers > 1:
        raise UnsupportedModule(
            f"{module} draws its dropout between layers where it cannot be seen, so its gradient per record cannot be "
            "computed again. Build single layers with dropout=0 and put nn.Dropout between them."
        )
    if isinstance(source, PackedSequence):
        data, rank, expected = source.data, 2, 0
    else:
        data, rank, expected = source, 3, 0 if module.batch_first else 1
    if data.dim() != rank:
        raise UnsupportedModule(
            f"{module} reads its 2-D input as one sequence: rows would be positions, not records. Give it one sequence "
            "per record, of shape (B, positions, features), with batch_first=True."
        )
    states = 2 if isinstance(module, nn.LSTM) else 1
    if (_dim_of(use, data), *use.out_dims) != (expected, expected, *[1] * states):
        raise UnsupportedModule(
            f"{module} reads dimension {expected} of its input as the records, and the records of the batch do not lie "
            "there, so it would mix them. Give it (B, positions, features) with batch_first=True, or (positions, B, "
            "features) without."
        )
