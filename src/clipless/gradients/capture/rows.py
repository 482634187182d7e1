"""Taps whose rows are not the records: positions flattened together with them, windows, rows sent to experts.

Seeds identify the record of each row (see checks/seeds.py). A layer rule treats each row as a record, and its forms are then
added up by record.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from clipless.errors import UnsupportedModule
from clipless.gradients.capture.calls import Call
from clipless.gradients.capture.model_map import Layer
from clipless.gradients.forms import Form, Routed
from clipless.gradients.layers import Use
from clipless.gradients.layers.generic import generic_rows
from clipless.gradients.records import written
from clipless.gradients.trees import Dims, Shapes


class Located(NamedTuple):
    """Where the records lie in the operands and results of an operation. If its rows are not the records, `rows` is their
    number."""

    dims: Dims
    out_dims: Dims
    rows: int = 0


def rows_of_call(
    layer: Layer, dims: Dims, shapes: Shapes, out_dims: Dims, out_shapes: Shapes, records: int
) -> tuple[Dims, Dims, int]:
    """Where the rows of a call lie in its inputs and outputs, and their number; raises if the numbers disagree.

    A call on an unbatched input is a single row.
    """
    bags = isinstance(layer.module, nn.EmbeddingBag)
    if not layer.is_generic and not bags and shapes and _unbatched(layer.module, len(shapes[0])):
        return tuple(None for _ in dims), tuple(None for _ in out_dims), 1
    if bags and len(shapes[0]) == 1 and len(shapes) > 1:
        return tuple(None for _ in dims), (0,), out_shapes[0][0]  # bags by offsets: a row for each of them
    sizes = {shape[dim] for shape, dim in zip(out_shapes, out_dims, strict=True) if dim is not None}
    given = {shape[dim] for shape, dim in zip(shapes, dims, strict=True) if dim is not None}
    if layer.is_generic and sizes == {records}:
        sizes = given - sizes
    if len(sizes) != 1 or None in out_dims or not given <= (sizes | {records} if layer.is_generic else sizes):
        got, gave = (", ".join(written(shape, records) for shape in every) for every in (shapes, out_shapes))
        raise UnsupportedModule(
            f"module {layer.name!r} turns ({got}) into ({gave}) for a batch of B records, and it is unknown which of its "
            "rows belong to which record. Give it one row per record, in the first dimension."
        )
    return dims, out_dims, sizes.pop()


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


def _unbatched(module: nn.Module, rank: int) -> bool:
    """Whether an input of this rank is a single record for the layer."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return rank == 1 + len(module.kernel_size)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return rank == len(module.normalized_shape)
    return rank == (0 if isinstance(module, nn.Embedding) else 1)


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
    """The forms of a call whose rows are not the records."""
    assert call.record is not None
    if call.layer.is_generic:
        return dict(generic_rows(use, grads, call.record, records))
    if call.out_dims[0] is None:
        one = use.input.unsqueeze(0)
        use = use._replace(input=one, args=(one,), kwargs={}, dims=(0,), out_dims=(0,))
        grads = tuple(grad.unsqueeze(0) for grad in grads)
    return {name: Routed(form, call.record, records) for name, form in call.layer.rule(use, grads).items()}
