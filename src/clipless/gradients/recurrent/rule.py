"""Layer rules of recurrent layers and cells: backpropagation through time, which gives the gates' gradients by record.

Index legend: b record, t position, i in, h hidden (after the projection, if there is one), g gates times hidden, l layer
times direction.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from clipless.errors import UnsupportedModule
from clipless.gradients.forms import Form, Instantiated, OuterProducts
from clipless.gradients.layers.rule import Use, at_least_float32, register
from clipless.gradients.recurrent.cells import cell_of
from clipless.gradients.recurrent.recurrence import back, forward
from clipless.gradients.recurrent.sequences import Sequences
from clipless.gradients.recurrent.takeover import InputGradients, SavedPass, layers_of
from clipless.gradients.recurrent.through_time import HiddenState, LayerGradients, Trace
from clipless.torch_internals import pytree


@register(nn.RNN, nn.LSTM, nn.GRU)
def recurrent(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    """Any number of layers, both directions, projections, dropout between layers, given initial states, padded or packed
    sequences.

    Uses what a takeover has saved in the forward pass; without one the layer is recomputed.
    """
    module = use.module
    assert isinstance(module, nn.RNNBase)
    source, given = _arguments(*use.args, **use.kwargs)
    _refuse(use, module, source)
    packed = isinstance(source, PackedSequence)
    sequences = Sequences(module.batch_first and not packed, source.batch_sizes if packed else None)
    order = source.sorted_indices if packed else None
    kept: SavedPass = use.kept or _computed_again(module, source, sequences, _sorted(given, order))
    dtype = kept.traces[0].x.dtype
    grad = sequences.timed(_as_given(sequences, grads[0].to(dtype)))  # [t,b,h]
    final = _sorted(tuple(grad.to(dtype).transpose(0, 1) for grad in grads[1:]), order)  # [l,b,h]
    to_input, *to_states = kept.input_grads.wanted
    how = {"to_input": to_input, "to_state": any(to_states)}
    found = back(kept.traces, grad, final, sequences.sizes(grad), **how)
    of_x = None if found.x is None else sequences.given(found.x)
    kept.input_grads.grads = (of_x, *found.state) if found.state else (of_x, *[None] * len(to_states))
    forms: dict[str, Form] = {}
    directions = ("", "_reverse") if module.bidirectional else ("",)
    suffixes = [f"_l{layer}{direction}" for layer in range(module.num_layers) for direction in directions]
    for suffix, trace, layer_grads in zip(suffixes, kept.traces, found.grads_at, strict=True):
        forms |= _forms(use, suffix, trace, layer_grads, source.unsorted_indices if packed else None)
    return forms


@register(nn.RNNCell, nn.LSTMCell, nn.GRUCell)
def recurrent_cell(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    """A single time step. The engine combines the forms of all calls."""
    module = use.module
    assert isinstance(module, nn.RNNCellBase)
    x, given = _arguments(*use.args, **use.kwargs)
    if x.dim() != 2 or (_dim_of(use, x), *use.out_dims) != (0, *[0] * len(grads)):
        raise UnsupportedModule(f"{module} needs an input of shape (B, features), with one row per record.")
    x = at_least_float32(x).unsqueeze(0)  # [t,b,i]
    biases = ("bias_ih", "bias_hh") if module.bias else ()
    state = given or tuple(x.new_zeros(len(x[0]), module.hidden_size) for _ in grads)
    flat = [getattr(module, name).detach().to(x.dtype) for name in ("weight_ih", "weight_hh", *biases)]
    cell, layers = cell_of(module), layers_of(flat, module.bias, depth=1, bidirectional=False)
    traces = forward(cell, layers, x, _stacked(state, x), [x.shape[1]]).traces
    found = back(traces, None, _stacked(grads, x), [x.shape[1]])
    return _forms(use, "", traces[0], found.grads_at[0])


def _computed_again(
    module: nn.RNNBase, source: Tensor | PackedSequence, sequences: Sequences, given: HiddenState
) -> SavedPass:
    data = source.data if isinstance(source, PackedSequence) else source
    x = sequences.timed(at_least_float32(data)).contiguous()
    cell, flat = cell_of(module), [weight.detach().to(x.dtype) for weight in module._flat_weights if weight is not None]
    layers = layers_of(flat, module.bias, module.num_layers, module.bidirectional)
    widths = [layers[0][0].hh.shape[1], module.hidden_size][: 1 + cell.cell_state]
    state = tuple(part.to(x.dtype) for part in given) or tuple(
        x.new_zeros(module.num_layers * len(layers[0]), x.shape[1], width) for width in widths
    )
    traces = forward(cell, layers, x, state, sequences.sizes(x)).traces
    return SavedPass(traces, InputGradients([False] * (1 + len(state))))


def _forms(
    use: Use, suffix: str, trace: Trace, layer_grads: LayerGradients, order: Tensor | None = None
) -> dict[str, Form]:
    """The wanted forms of one layer in one direction, with the records in this order."""

    def records_first(timed: Tensor) -> Tensor:
        return (timed if order is None else timed.index_select(1, order)).transpose(0, 1)

    wanted = {name for name in _NAMES if name + suffix in use.wanted}
    gates, forms = records_first(layer_grads.gates), dict[str, Form]()
    shared = layer_grads.hidden_gates is layer_grads.gates
    hidden_gates = gates if shared else records_first(layer_grads.hidden_gates)
    if "weight_ih" in wanted:
        forms["weight_ih"] = of_input = OuterProducts(records_first(trace.x), gates)
    if "weight_hh" in wanted:
        twin = of_input if shared and "weight_ih" in wanted else None
        forms["weight_hh"] = OuterProducts(records_first(trace.before), hidden_gates, twin)
    if "weight_hr" in wanted and trace.unprojected is not None and layer_grads.projected is not None:
        forms["weight_hr"] = OuterProducts(records_first(trace.unprojected), records_first(layer_grads.projected))
    if "bias_ih" in wanted:
        forms["bias_ih"] = Instantiated(gates.sum(1))
    if "bias_hh" in wanted:
        again = shared and "bias_ih" in forms
        forms["bias_hh"] = forms["bias_ih"] if again else Instantiated(hidden_gates.sum(1))
    return {name + suffix: form for name, form in forms.items()}


_NAMES = ("weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh")


def _arguments(input: Any, hx: Any = None) -> tuple[Any, HiddenState]:
    """The input and the initial states; the arguments have torch's names. The states are empty if none were given."""
    return input, () if hx is None else (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _sorted(states: HiddenState, order: Tensor | None) -> HiddenState:
    """States of [l,b,h] with the records in this order."""
    return states if order is None else tuple(state.index_select(1, order) for state in states)


def _as_given(sequences: Sequences, grad: Tensor) -> Tensor:
    """The output's gradient in the layout of the layer's output; `grad` has the records first."""
    return grad if sequences.batch_first or sequences.batch_sizes is not None else grad.transpose(0, 1)


def _stacked(states: HiddenState, like: Tensor) -> HiddenState:
    return tuple(state.to(like.dtype).unsqueeze(0) for state in states)


def _dim_of(use: Use, tensor: Tensor) -> int | None:
    """The dimension of the records in this tensor of the input."""
    tensors = [leaf for leaf in pytree.tree_leaves((use.args, dict(use.kwargs))) if isinstance(leaf, Tensor)]
    return next(dim for leaf, dim in zip(tensors, use.dims, strict=True) if leaf is tensor)


def _refuse(use: Use, module: nn.RNNBase, source: Tensor | PackedSequence) -> None:
    if use.kept is None and module.dropout > 0 and module.training and module.num_layers > 1:
        raise UnsupportedModule(
            f"{module} draws its dropout between layers inside torch's kernel, in 16 bits or on packed sequences, so its "
            "per-sample gradients cannot be recomputed. Build single layers with dropout=0 and put nn.Dropout between "
            "them."
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
