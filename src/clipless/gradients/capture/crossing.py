"""An operation in which traced tensors meet the records, and its per-sample gradients."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from clipless.gradients.capture import messages
from clipless.gradients.capture.writes import Function
from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.forms import (
    Form,
    Instantiated,
    OuterProducts,
    Routed,
    Scattered,
    Stacked,
    by_record,
    transposed,
)
from clipless.gradients.layers.linear import positions
from clipless.gradients.layers.rule import at_least_float32
from clipless.gradients.trees import Dims, differentiable

# By how much the sum of the rows' gradients may differ from the gradient of the whole, relative to their norms.
ROWS_TOLERANCE = 1e-3

# Placeholders for a traced tensor, a plain tensor and the number of records among an operation's arguments.
TRACED, PLAIN, RECORDS = (type(name, (), {})() for name in ("TRACED", "PLAIN", "RECORDS"))


@dataclass(frozen=True)
class Root:
    """A parameter that traced tensors are computed from: a leaf of their graph."""

    name: str
    owner: str
    value: Tensor


class FromParameters(Protocol):
    """A tensor computed from parameters alone."""

    value: Tensor
    roots: tuple[Root, ...]


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
        self._leaves, self._tensor_dims = leaves, list(dims)

    def settle(self, dims: Dims) -> None:
        """Does nothing: operations that no probe has met are refused, so their layout is always known."""

    def forms(
        self, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...], records: int
    ) -> list[tuple[str, Form | Routed]]:
        """The per-sample gradients of every parameter that the traced tensors come from."""
        grads = tuple(at_least_float32(g.movedim(dim or 0, 0)) for g, dim in zip(grads, self.out_dims, strict=True))
        floats = [at_least_float32(t) if t.is_floating_point() else t for t in tensors]
        if self.func in _EXPERTS:
            stack = _experts(self, floats, grads[0], records)
            if stack is None:
                raise messages.unidentified_rows(self.owner)
            return list(_to_roots(self.traced[0], stack))
        quick = _QUICK.get(self.func)
        found = quick(self, floats, grads[0]) if quick else None
        if found is None:
            written = self._pulled_back(floats, grads)
            if self.rows:
                self._refuse_rows_together(floats, grads, written)
            found = [Instantiated(value) for value in written]
        pairs: list[tuple[str, Form | Routed]] = []
        for tensor, form in zip(self.traced, found, strict=True):
            if self.record is None:
                pairs += _to_roots(tensor, form)
                continue
            rows = Routed(form, self.record, records)
            pairs += [(tensor.roots[0].name, rows)] if tensor.value.is_leaf else _to_roots(tensor, by_record([rows])[0])
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
            apart = rows.sum(0) if total is None else rows.sum(0) - total
            if _length(apart) > ROWS_TOLERANCE * max(_length(rows), 0.0 if total is None else _length(total)):
                raise messages.rows_together(self.owner)

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
            return vmap(grad(inner), in_dims=in_dims)(values, tensors, grads)


def _length(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _to_roots(tensor: FromParameters, form: Form) -> list[tuple[str, Form]]:
    """The per-sample gradients of the parameters that a traced tensor was computed from, given its own."""
    if tensor.value.is_leaf:
        return [(tensor.roots[0].name, form)]
    direct = _directly(tensor, form)
    if direct is not None:
        return [(tensor.roots[0].name, direct)]
    values = [root.value for root in tensor.roots]
    cotangents = form.per_record().to(tensor.value.dtype)
    grads = torch.autograd.grad(
        [tensor.value], values, [cotangents], retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    pairs = zip(tensor.roots, grads, strict=True)
    return [(root.name, Instantiated(at_least_float32(g))) for root, g in pairs if g is not None]


def _directly(tensor: FromParameters, form: Form) -> Form | None:
    """The parameter's form, if the traced tensor is a slice of it or has its last two dimensions transposed; else None."""
    node = tensor.value.grad_fn
    if node is None or len(tensor.roots) > 1 or getattr(node.next_functions[0][0], "variable", None) is None:
        return None
    whole = tensor.roots[0].value
    if node.name() == "SelectBackward0" and node._saved_dim == 0:  # type: ignore[attr-defined]
        index = node._saved_index  # type: ignore[attr-defined]
        return Stacked({(index - 2**64 if index >= 2**63 else index) % len(whole): form}, len(whole))
    swapped = node.name() in ("TransposeBackward0", "TBackward0") and tensor.value.shape == whole.mT.shape
    last = swapped and (node.name() == "TBackward0" or _last_two(node, whole.dim()))
    return transposed(form) if last else None


def _last_two(node: Any, rank: int) -> bool:
    """Whether a transposition swaps the last two of so many dimensions, which autograd keeps as unsigned numbers."""
    dims = (node._saved_dim0, node._saved_dim1)
    return {(dim - 2**64 if dim >= 2**63 else dim) % rank for dim in dims} == {rank - 2, rank - 1}


def reduced(grads: Tensor, shape: torch.Size) -> Tensor:
    """Per-record gradients [b, ...] of something that was broadcast, summed to the shape it had before, [b, *shape]."""
    extra = grads.dim() - 1 - len(shape)
    grads = grads.sum(tuple(range(1, 1 + extra))) if extra > 0 else grads
    wide = tuple(k + 1 for k, size in enumerate(shape) if size == 1 and grads.shape[k + 1] != 1)
    return grads.sum(wide, keepdim=True) if wide else grads


def _linear(crossing: Crossing, tensors: list[Tensor], grad_output: Tensor) -> list[Form] | None:
    args, _ = crossing.arguments([None] * len(crossing.traced), list(tensors), records=1)
    if not args or args[0] is None or args[0].dim() < 2:
        return None
    acts, grads = positions(crossing.records_first(tensors)[0]), positions(grad_output)
    by_rank: dict[int, Form] = {2: OuterProducts(acts, grads.to(acts.dtype)), 1: Instantiated(grads.sum(1))}
    if len(tensors) > 1 or any(tensor.value.dim() not in by_rank for tensor in crossing.traced):
        return None
    return [by_rank[tensor.value.dim()] for tensor in crossing.traced]


def _embedding(crossing: Crossing, tensors: list[Tensor], grad_output: Tensor) -> list[Form] | None:
    args, kwargs = crossing.arguments([None] * len(crossing.traced), crossing.records_first(tensors), records=1)
    plain_lookup = all(kwargs.get(name) is None for name in ("padding_idx", "max_norm"))
    if len(crossing.traced) != 1 or len(args) > 2 or not plain_lookup:
        return None
    indices = args[0].flatten(1) if args[0].dim() > 1 else args[0].unsqueeze(1)
    size, width = crossing.traced[0].value.shape
    return [Scattered(indices, grad_output.reshape(*indices.shape, width), size)]


def _spread(crossing: Crossing, tensors: list[Tensor], grad_output: Tensor) -> list[Form] | None:
    dim = crossing.out_dims[0] or 0
    return [Instantiated(reduced(grad_output.unsqueeze(dim + 1), crossing.traced[0].value.shape))]


def _sum(crossing: Crossing, tensors: list[Tensor], grad_output: Tensor) -> list[Form] | None:
    args, kwargs = crossing.arguments([None] * len(crossing.traced), list(tensors), records=1)
    if kwargs or len(args) != 2 or len(crossing.traced) != 1:
        return None
    return _spread(crossing, tensors, grad_output)


def _matmul(crossing: Crossing, tensors: list[Tensor], grad_output: Tensor) -> list[Form] | None:
    """x @ W for a matrix W."""
    args, _ = crossing.arguments([None] * len(crossing.traced), list(tensors), records=1)
    if len(args) != 2 or args[0] is None or args[0].dim() < 2 or crossing.traced[0].value.dim() != 2:
        return None
    acts, grads = positions(crossing.records_first(tensors)[0]), positions(grad_output)
    return [OuterProducts(grads.to(acts.dtype), acts)]


def _experts(crossing: Crossing, tensors: list[Tensor], grads: Tensor, records: int) -> Form | None:
    """x[n] @ W[e] for every row n, where offsets say which rows go to which matrix e."""
    args, kwargs = crossing.arguments([None] * len(crossing.traced), list(tensors), records=1)
    given = dict(zip(("acts", "weight", "offs"), args, strict=False)) | kwargs
    acts, offsets = given["acts"], given.get("offs")
    if acts is None or acts.dim() != 2 or offsets is None or len(crossing.traced) != 1:
        return None
    record = torch.arange(records, device=acts.device) if crossing.record is None else crossing.record
    grads, ends = grads.to(acts.dtype).unsqueeze(1), [0, *offsets.tolist()]
    parts: dict[int, Form] = {}
    for number, (first, last) in enumerate(pairwise(ends)):
        if last > first:
            products = OuterProducts(grads[first:last], acts[first:last].unsqueeze(1))
            parts[number] = by_record([Routed(products, record[first:last], records)])[0]
    return Stacked(parts, len(crossing.traced[0].value)) if parts else None


_QUICK: dict[Function, Callable[[Crossing, list[Tensor], Tensor], list[Form] | None]] = {
    nn.functional.linear: _linear,
    nn.functional.embedding: _embedding,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.expand_as: _spread,
    Tensor.expand: _spread,
    torch.add: _sum,
    Tensor.add: _sum,
    Tensor.__add__: _sum,
    Tensor.__radd__: _sum,
}
_EXPERTS = {torch._grouped_mm, nn.functional.grouped_mm}
