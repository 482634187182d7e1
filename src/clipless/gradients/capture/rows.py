"""Taps whose rows are not the records: positions flattened together with them, windows, rows sent to experts.

Seeds identify the record of each row (see checks/seeds.py). A layer rule treats each row as a record, and its forms are then
added up by record.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clipless.errors import UnsupportedModule
from clipless.gradients.capture import messages
from clipless.gradients.capture.calls import Call
from clipless.gradients.capture.model_map import Layer
from clipless.gradients.forms import Form, Routed
from clipless.gradients.layers import Use
from clipless.gradients.layers.batching import batch_dims, is_packed, is_unbatched
from clipless.gradients.layers.generic import generic_rows, gradients_together
from clipless.gradients.records import written
from clipless.gradients.trees import Dims, Shapes

# By how much the sum of the rows' gradients may differ from the gradient of the whole, relative to their norms.
ROWS_TOLERANCE = 1e-3


class TensorRows(NamedTuple):
    """The shapes of some tensors, the dimension along which each has rows, and whether these are not the records."""

    shapes: Shapes
    dims: Dims
    own: tuple[bool, ...] = ()

    def sizes(self, some: tuple[bool, ...] | None = None) -> set[int]:
        """The numbers of rows of the tensors, or of some of them."""
        every = zip(self.shapes, self.dims, some or [True] * len(self.dims), strict=True)
        return {shape[dim] for shape, dim, wanted in every if wanted and dim is not None}


class Located(NamedTuple):
    """Where the records lie in the operands and results of an operation. If its rows are not the records, `rows` is their
    number."""

    dims: Dims
    out_dims: Dims
    rows: int = 0


class LocatedCall(NamedTuple):
    """Where the rows lie in the inputs and outputs of a call, and their number. `by_record`: which inputs have a slice for
    each record along their dimension, and not for each row. A tensor without a dimension belongs to all rows."""

    dims: Dims
    out_dims: Dims
    rows: int
    by_record: tuple[bool, ...] = ()


def rows_of_call(layer: Layer, inputs: TensorRows, outputs: TensorRows, records: int) -> LocatedCall:
    """Where the rows of a call lie, by what its layer reads as the batch; in a module without a rule by what probes found.

    Raises if the numbers disagree. A call on an unbatched input is a single row.
    """
    if layer.is_generic:
        found = _rows_without_rule(inputs, outputs, records)
    else:
        found = _rows_of_layer(layer.module, inputs, outputs)
    if found is None:
        got, gave = (", ".join(written(shape, records) for shape in every.shapes) for every in (inputs, outputs))
        raise UnsupportedModule(
            f"module {layer.name!r} turns ({got}) into ({gave}) for a batch of B records, and it is unknown which of its "
            "rows belong to which record. Give it one row per record, in the first dimension."
        )
    return found


def _rows_without_rule(inputs: TensorRows, outputs: TensorRows, records: int) -> LocatedCall | None:
    sizes, given = outputs.sizes(), inputs.sizes(inputs.own)
    if len(sizes) != 1 or None in outputs.dims or not (given <= sizes or records == 1):
        return None
    dims = inputs.dims if records > 1 else tuple(None for _ in inputs.dims)  # all of it is one record's
    return LocatedCall(dims, outputs.dims, sizes.pop(), tuple(not own for own in inputs.own))


def _rows_of_layer(module: nn.Module, inputs: TensorRows, outputs: TensorRows) -> LocatedCall | None:
    shapes, out_shapes = inputs.shapes, outputs.shapes
    ranks, out_ranks = tuple(map(len, shapes)), tuple(map(len, out_shapes))
    if isinstance(module, nn.EmbeddingBag):
        if len(shapes[0]) == 1 and len(shapes) > 1:  # bags by offsets: a row for each of them
            return LocatedCall(tuple(None for _ in shapes), (0,), out_shapes[0][0])
    elif shapes and is_unbatched(module, ranks):
        return LocatedCall(tuple(None for _ in shapes), tuple(None for _ in out_shapes), 1)
    dims, out_dims = inputs.dims, outputs.dims
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        packed = is_packed(module, ranks)
        dims, out_dims = (batch_dims(module, every, packed) for every in (ranks, out_ranks))
    sizes = TensorRows(out_shapes, out_dims).sizes()
    if len(sizes) != 1 or None in out_dims or not TensorRows(shapes, dims).sizes() <= sizes:
        return None
    return LocatedCall(dims, out_dims, sizes.pop())


def rows_of_results(owner: str, dims: Dims, shapes: Shapes, out_dims: Dims, out_shapes: Shapes, records: int) -> int:
    """How many rows the results of an operation have, the same in all tensors that carry any; 0 if they carry none."""
    sizes = {shape[dim] for shape, dim in zip(out_shapes, out_dims, strict=True) if dim is not None}
    given = {shape[dim] for shape, dim in zip(shapes, dims, strict=True) if dim is not None}
    if sizes and (len(sizes) > 1 or not given <= sizes):
        got, gave = (", ".join(written(shape, records) for shape in every) for every in (shapes, out_shapes))
        raise UnsupportedModule(
            f"module {owner!r} turns ({got}) into ({gave}) where its parameters meet a batch of B records, and it is "
            "unknown which of its rows belong to which record. Keep one row per record, in the first dimension."
        )
    return sizes.pop() if sizes else 0


def rows_of_operation(operands: list[Any], results: list[Tensor]) -> Located:
    """The rows of an operation that probes cannot locate, because the operations of its module depend on the data.

    If an operand may carry records, each row of the result is taken to be a row.
    """
    tensors = [x for x in operands if isinstance(x, Tensor)]
    meets = any(x.dim() > 0 and (x.is_floating_point() or x.numel() > 1) for x in tensors)
    if not meets or results[0].dim() == 0 or is_single(tensors):
        return Located(tuple(None for _ in operands), tuple(None for _ in results))
    rows = len(results[0])
    dims = tuple(0 if isinstance(x, Tensor) and x.dim() > 0 and len(x) == rows else None for x in operands)
    return Located(dims, tuple(0 for _ in results), rows)


def is_single(operands: list[Any]) -> bool:
    """Whether no floating-point operand has rows, that is two dimensions or more."""
    ranks = [x.dim() for x in operands if isinstance(x, Tensor) and x.is_floating_point()]
    return bool(ranks) and max(ranks) < 2


def rows_rule(call: Call, use: Use, grads: tuple[Tensor, ...], records: int) -> dict[str, Form | Routed]:
    """The forms of a call whose rows are not the records; by row if it is not known yet whose these are."""
    record = call.record
    if call.layer.is_generic:
        assert record is not None
        forms = generic_rows(use, grads, record, records, call.by_record or tuple(False for _ in use.dims))
        together = gradients_together(use, grads)
        for path, form in forms.items():
            refuse_rows_together(call.owner, form.per_record(), together[path])
        return dict(forms)
    if call.out_dims[0] is None:
        use = use.batched_by_one(tuple(grad.dim() for grad in grads))
        grads = tuple(grad.unsqueeze(0) for grad in grads)
    forms = call.layer.rule(use, grads)
    return {name: form if record is None else Routed(form, record, records) for name, form in forms.items()}


def refuse_rows_together(owner: str, found: Tensor, together: Tensor | None) -> None:
    """Raise if the gradients found for single rows or records do not add up to that of all of them together, so that they
    were not computed from these rows alone."""
    apart = found.sum(0) if together is None else found.sum(0) - together
    if _length(apart) > ROWS_TOLERANCE * max(_length(found), 0.0 if together is None else _length(together)):
        raise messages.rows_together(owner)


def _length(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
