"""Where the records lie in a call of a module, or in an operation on traced tensors.

A probe has found it (layout.py); what is left are calls that no probe met and rows that are not the records.
"""

from typing import Any

from torch import Tensor

from clipless.errors import UnsupportedModule
from clipless.gradients.capture import messages
from clipless.gradients.capture.frames import Frame
from clipless.gradients.capture.layout import Place
from clipless.gradients.capture.micro_batch import MicroBatch
from clipless.gradients.capture.patterns import CallPattern
from clipless.gradients.capture.rows import (
    Located,
    TensorRows,
    is_single,
    rows_of_call,
    rows_of_operation,
    rows_of_results,
)
from clipless.gradients.capture.traced import located_shapes, refuse_mixing
from clipless.gradients.records import broken_records
from clipless.gradients.trees import Shapes, plain_tensors
from clipless.torch_internals import pytree


def locate_input(pattern: CallPattern, frame: Frame, shapes: Shapes, records: int) -> None:
    """Set `frame.dims` for inputs of these shapes, and `has_rows` if their rows are not the records.

    Raises if no input has any rows.
    """
    dims = pattern.layout.dims(frame.place, shapes, records)
    if dims is None and shapes:
        frame.dims, frame.has_rows = pattern.layout.row_dims(frame.place, shapes), True
        return
    frame.dims = dims or ()
    if all(dim is None for dim in frame.dims):
        if not any(shapes):
            pattern.forget()
            raise messages.shared_input(frame.place, shapes, records)
        # The module may be called on one record at a time. Seeds distinguish that from a table that all records share.
        frame.dims, frame.has_rows = tuple(0 if shape else None for shape in shapes), True
        return
    frame.unsure = not pattern.layout.was_probed(frame.place, shapes)
    pattern.remember_single(frame.place)


def locate_output(pattern: CallPattern, frame: Frame, shapes: Shapes, out_shapes: Shapes, records: int) -> None:
    """Set `frame.out_dims` for outputs of these shapes, and `rows` if the call's rows are not the records.

    Raises if an output has no dimension for the records.
    """
    place = frame.place.output()
    dims = None if frame.has_rows else pattern.layout.dims(place, out_shapes, records)
    if dims is None and out_shapes:
        _locate_rows(pattern, frame, shapes, out_shapes, records)
        return
    frame.out_dims = dims or ()
    if any(dim is None for dim in frame.out_dims):
        pattern.forget()
        raise messages.shared_input(place, out_shapes, records)
    frame.unsure |= not pattern.layout.was_probed(place, out_shapes)


def _locate_rows(pattern: CallPattern, frame: Frame, shapes: Shapes, out_shapes: Shapes, records: int) -> None:
    """Set where the rows lie in a call whose rows are not the records. Seeds will identify their records."""
    out_dims = pattern.layout.row_dims(frame.place.output(), out_shapes)
    if all(dim is None for dim in out_dims):
        out_dims = tuple(0 if shape else None for shape in out_shapes)
    own = pattern.layout.has_own_rows(frame.place, shapes, frame.dims, records)
    try:
        found = rows_of_call(
            frame.layer, TensorRows(shapes, frame.dims, own), TensorRows(out_shapes, out_dims), records
        )
    except UnsupportedModule:
        pattern.forget()
        raise
    frame.dims, frame.out_dims, frame.rows, frame.by_record = found
    frame.has_rows = True


def mark_broken(frame: Frame, inputs: tuple[Any, Any], micro: MicroBatch) -> None:
    """Mark the records whose data, not yet touched by a parameter, are not finite. In a module without a rule -inf may
    belong to a mask and counts as finite."""
    tensors = plain_tensors(inputs) or [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    for tensor, dim in zip(tensors, frame.dims, strict=True):
        broken = broken_records(tensor, dim, micro.records, masks=frame.layer.is_generic)
        if broken is not None:
            micro.broken = broken if micro.broken is None else micro.broken | broken


def locate_operation(
    pattern: CallPattern, place: Place, operands: list[Any], results: list[Tensor], records: int
) -> Located:
    """Where the records, or rows that are not the records, lie in the operands (tensors and sizes) and the results.

    Raises if the probes did not meet the operation, or if it mixes records.
    """
    owner, layout, result = place.name, pattern.layout, place._replace(side="result")
    known = layout.knows(place) and layout.knows(result)
    if owner in pattern.routed or (pattern.has_rows and place.inside and not known):
        if is_single(operands):
            pattern.forget()
            raise messages.rows_together(owner)
        return rows_of_operation(operands, results)
    if not known:
        pattern.forget()
        raise messages.left_the_model(owner)
    shapes, result_shapes = located_shapes(operands, results)
    dims, out_dims = layout.dims(place, shapes, records), layout.dims(result, result_shapes, records)
    rows = 0
    if dims is None or out_dims is None:
        dims, out_dims = layout.row_dims(place, shapes), layout.row_dims(result, result_shapes)
        rows = rows_of_results(owner, dims, shapes, out_dims, result_shapes, records)
    refuse_mixing(owner, operands, dims, out_dims)
    return Located(dims, out_dims, rows)
