"""An operation in which traced tensors meet the records, and its per-sample gradients."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from clipless.gradients.capture import messages
from clipless.gradients.capture.known_operations import EXPERTS, QUICK, experts
from clipless.gradients.capture.roots import FromParameters, to_roots
from clipless.gradients.capture.rows import refuse_rows_together
from clipless.gradients.capture.writes import Function
from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.forms import Form, Instantiated, Routed, by_record
from clipless.gradients.layers.rule import at_least_float32
from clipless.gradients.trees import Dims, differentiable
from clipless.random_state import random_state_of, same_random_state
from clipless.torch_internals import pytree

# Placeholders for a traced tensor, a plain tensor and the number of records among an operation's arguments.
TRACED, PLAIN, RECORDS = (type(name, (), {})() for name in ("TRACED", "PLAIN", "RECORDS"))


class Crossing:
    """An operation in which `traced` tensors meet the records, kept until its gradient arrives.

    `leaves` are its flattened arguments, with TRACED, PLAIN and RECORDS in place of tensors and of the number of records;
    `tensors` are the plain ones, given to autograd to keep, and `dims` says where their records lie.
    """

    micro: object
    forward_pass: ForwardPass | None
    receive: Callable[["Crossing", tuple[Tensor, ...], tuple[Tensor, ...]], None]
    unsure = False
    rows = 0
    record: Tensor | None = None

    def __init__(
        self,
        func: Function,
        leaves: list[Any],
        spec: pytree.TreeSpec,
        traced: list[FromParameters],
        tensors: list[Tensor],
        dims: Dims,
        out_dims: Dims,
    ) -> None:
        self.func, self.spec, self.traced, self.out_dims = func, spec, traced, out_dims
        self.owner = traced[0].roots[0].owner
        self.tensors = tuple(tensors)
        self._versions = [tensor.value._version for tensor in traced]
        self._leaves, self._tensor_dims = leaves, list(dims)

    def settle(self, dims: Dims) -> None:
        """Does nothing: operations that no probe has met are refused, so their layout is always known."""

    def forms(
        self, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...], records: int
    ) -> list[tuple[str, Form | Routed]]:
        """The per-sample gradients of every parameter that the traced tensors come from."""
        if self._versions != [tensor.value._version for tensor in self.traced]:
            raise messages.in_place(self.owner, "of a tensor that was used before")
        grads = tuple(at_least_float32(g.movedim(dim or 0, 0)) for g, dim in zip(grads, self.out_dims, strict=True))
        floats = [at_least_float32(t) if t.is_floating_point() else t for t in tensors]
        if self.func in EXPERTS:
            stack = experts(self, floats, grads[0], records)
            if stack is None:
                raise messages.unidentified_rows(self.owner)
            return list(to_roots(self.traced[0], stack))
        quick = QUICK.get(self.func)
        found = quick(self, floats, grads[0]) if quick else None
        if found is None:
            written = self._pulled_back(floats, grads)
            if self.rows:
                self._refuse_rows_together(floats, grads, written)
            found = [Instantiated(value) for value in written]
        pairs: list[tuple[str, Form | Routed]] = []
        for tensor, form in zip(self.traced, found, strict=True):
            if self.record is None:
                pairs += to_roots(tensor, form)
                continue
            rows = Routed(form, self.record, records)
            pairs += [(tensor.roots[0].name, rows)] if tensor.value.is_leaf else to_roots(tensor, by_record([rows])[0])
        return pairs

    def records_first(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, self._tensor_dims, strict=True)]

    def arguments(self, traced: list[Any], tensors: list[Any], records: int) -> tuple[Any, Any]:
        """The operation's arguments with these tensors in place of its own, and this number of records in sizes."""
        ours, theirs = iter(traced), iter(tensors)
        places = {TRACED: ours, PLAIN: theirs}
        leaves = [next(places[leaf]) if leaf in (TRACED, PLAIN) else leaf for leaf in self._leaves]
        leaves = [records if leaf is RECORDS else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def _refuse_rows_together(self, tensors: list[Tensor], grads: tuple[Tensor, ...], found: list[Tensor]) -> None:
        """Raise if the operation does not treat every row by itself, that is, if the gradients of the rows do not add up to
        the gradient of the whole operation."""
        values = [at_least_float32(tensor.value.detach()).requires_grad_() for tensor in self.traced]
        args, kwargs = self.arguments(values, list(tensors), records=self.rows)
        with torch.enable_grad():
            outputs = differentiable(self.func(*args, **kwargs))
        arrived = [g.movedim(0, dim or 0).to(o.dtype) for o, g, dim in zip(outputs, grads, self.out_dims, strict=True)]
        whole = torch.autograd.grad(outputs, values, arrived, allow_unused=True)
        for rows, total in zip(found, whole, strict=True):
            refuse_rows_together(self.owner, rows, total)

    def _pulled_back(self, tensors: list[Tensor], grads: tuple[Tensor, ...]) -> list[Tensor]:
        def inner(traced: list[Tensor], rows: list[Tensor], cotangents: tuple[Tensor, ...]) -> Tensor:
            one = [r if dim is None else r.unsqueeze(dim) for r, dim in zip(rows, self._tensor_dims, strict=True)]
            args, kwargs = self.arguments(traced, one, records=1)
            outputs = differentiable(self.func(*args, **kwargs))
            parts = zip(outputs, self.out_dims, cotangents, strict=True)
            return torch.stack([(out.squeeze(dim or 0) * cotangent).sum() for out, dim, cotangent in parts]).sum()

        values = [at_least_float32(tensor.value.detach()) for tensor in self.traced]
        in_dims = (None, list(self._tensor_dims), tuple(0 for _ in grads))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            try:
                return vmap(grad(inner), in_dims=in_dims)(values, tensors, grads)
            except RuntimeError:  # an operator that torch does not know, as by torch.library.custom_op
                pass
        devices = {value.device for value in values}
        before = random_state_of(devices, ())
        try:
            found = _one_by_one(inner, values, tensors, in_dims[1], grads)
        except RuntimeError as error:
            raise messages.indivisible(self.owner, self.func) from error
        if not same_random_state(before, random_state_of(devices, ())):
            raise messages.draws_at_random(self.owner)
        return found


def _one_by_one(
    inner: Callable[..., Tensor],
    values: list[Tensor],
    tensors: list[Tensor],
    dims: Sequence[int | None],
    grads: tuple[Tensor, ...],
) -> list[Tensor]:
    """The same as vmap(grad(inner)), by a backward pass for every record."""
    leaves = [value.requires_grad_() for value in values]
    found = []
    with torch.enable_grad():
        for k in range(len(grads[0])):
            rows = [t if dim is None else t.select(dim, k) for t, dim in zip(tensors, dims, strict=True)]
            scalar = inner(leaves, rows, tuple(g[k] for g in grads))
            found.append(torch.autograd.grad(scalar, leaves, allow_unused=True, materialize_grads=True))
    if not found:
        return [value.new_zeros(0, *value.shape) for value in values]
    return [torch.stack(rows) for rows in zip(*found, strict=True)]
