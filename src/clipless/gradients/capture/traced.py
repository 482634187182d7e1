"""Parameters that are used outside any layer with a rule: class tokens, positions, scales, attention.

While its module runs, such a parameter is replaced by a `Traced` tensor, which has the same value and carries no records.
What is computed from traced tensors alone is traced too. An operation that combines traced tensors with records is tapped:
the gradient of its output, pulled back record by record, gives the parameter's per-sample gradient.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from clipless.errors import UnsupportedModule
from clipless.gradients.capture.attention import attention_with_dropout, multi_head_attention
from clipless.gradients.capture.crossing import PLAIN, RECORDS, TRACED, Crossing
from clipless.gradients.capture.roots import Root
from clipless.gradients.capture.rows import Located
from clipless.gradients.capture.writes import WRITES, Function
from clipless.gradients.trees import Dims, Shapes, differentiable
from clipless.torch_internals import DisableTorchFunctionSubclass, pytree


class Operations(Protocol):
    """Handles operations on traced tensors."""

    def locate(self, owner: str, operands: list[Any], results: list[Tensor]) -> Located:
        """Where the records lie in an operation's operands, tensors and sizes, and in its results."""

    def tap(self, crossing: Crossing, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        """The results of an operation on traced tensors and records, tapped."""

    def give_up(self, owner: str, operation: str) -> None:
        """The module cannot be handled operation by operation. Returns only if it can still be handled as a whole."""


class Traced(Tensor):
    """A tensor computed from parameters alone. Every operation on it goes through `__torch_function__`."""

    value: Tensor
    roots: tuple[Root, ...]
    operations: Operations
    parameter: nn.Parameter | None  # that it replaces, if it does

    @staticmethod
    def of(value: Tensor, roots: tuple[Root, ...], operations: Operations) -> "Traced":
        traced = Tensor._make_subclass(Traced, value.detach())
        traced.value, traced.roots, traced.operations, traced.parameter = value, roots, operations, None
        return traced

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.multi_head_attention_forward:
            return multi_head_attention(*args, **kwargs)
        if func is nn.functional.scaled_dot_product_attention and (*args[4:5], kwargs.get("dropout_p", 0.0))[0]:
            return attention_with_dropout(*args, **kwargs)
        if func in _CASTS and isinstance(args[0], Traced):
            func, args, kwargs = _cast(func, args, kwargs)
        if func in _REPEATS and isinstance(args[0], Traced):
            return _repeat(*args, **kwargs)
        if torch.is_grad_enabled() and _in_place(func, kwargs):
            return _write(func, args, kwargs)
        return _operation(func, args, kwargs)


def root(name: str, owner: str, parameter: nn.Parameter, operations: Operations) -> Traced:
    """The traced tensor that replaces a parameter while its module runs."""
    leaf = Root(name, owner, parameter.detach().requires_grad_())
    traced = Traced.of(leaf.value, (leaf,), operations)
    traced.parameter = parameter
    return traced


_CASTS = {Tensor.to, Tensor.type_as}


def _cast(func: Function, args: Any, kwargs: Any) -> tuple[Function, Any, Any]:
    """`to(x)` or `type_as(x)` as `to` with x's device and type in place of x, whose records do not matter."""
    named = {name: value for name, value in kwargs.items() if not isinstance(value, Tensor)}
    looks = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, Tensor)]
    if not looks:
        return func, args, kwargs
    rest = tuple(x for x in args[1:] if not isinstance(x, Tensor))
    return Tensor.to, (args[0], looks[0].device, looks[0].dtype, *rest), named


_REPEATS = {Tensor.repeat, Tensor.tile, torch.tile}


def _repeat(tensor: Tensor, *sizes: Any, **named: Any) -> Tensor:
    """`repeat` or `tile`, with each repetition as an expansion along a dimension of its own, which may be that of the
    records: so every row has a record, and not a part of each."""
    (given,) = named.values() if named else (sizes,)
    counts = list(given[0] if len(given) == 1 and not isinstance(given[0], int) else given)
    counts = [1] * (tensor.dim() - len(counts)) + counts
    whole = tensor.reshape(*[1] * (len(counts) - tensor.dim()), *tensor.shape)
    for dim, count in enumerate(counts):  # also by 1, which may be the number of records
        before, after = whole.shape[:dim], whole.shape[dim:]
        whole = whole.unsqueeze(dim).expand(*before, count, *after).flatten(dim, dim + 1)
    return whole.contiguous()


def _in_place(func: Function, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None


def _write(func: Function, args: Any, kwargs: Any) -> Any:
    """Write traced tensors into a tensor with records: they are expanded over the records, which is tapped, then written.

    A target without records is given up: it would have to become traced, and so would every other view of its memory.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    traced = next(leaf for leaf in leaves if isinstance(leaf, Traced))
    owner, target = traced.roots[0].owner, args[0]
    learns = isinstance(target, Traced) or not isinstance(target, Tensor) or target.is_floating_point()
    plain = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Traced)]
    if isinstance(target, Traced) and all(leaf.dim() == 0 and not leaf.requires_grad for leaf in plain):
        return _changed(func, target, leaves, spec)
    if learns and func in WRITES and not isinstance(target, Traced):
        (dim,), *_ = traced.operations.locate(owner, [target], [target])
        if dim is not None:
            return WRITES[func](target, dim, *args[1:], **kwargs)
    if learns:
        traced.operations.give_up(owner, getattr(func, "__name__", ""))
    with DisableTorchFunctionSubclass():
        return _run(func, [leaf.value.detach().clone() if isinstance(leaf, Traced) else leaf for leaf in leaves], spec)


def _changed(func: Function, target: Traced, leaves: list[Any], spec: pytree.TreeSpec) -> Traced:
    """Change a traced tensor in place by numbers and traced tensors. Autograd follows that in all views of its memory, and
    refuses it for a parameter itself."""
    with DisableTorchFunctionSubclass():
        _run(func, [leaf.value if isinstance(leaf, Traced) else leaf for leaf in leaves], spec)
    roots = [r for leaf in leaves if isinstance(leaf, Traced) for r in leaf.roots]
    target.roots = tuple({id(r): r for r in roots}.values())
    return target


def _operation(func: Function, args: Any, kwargs: Any) -> Any:
    """Run an operation on traced tensors. Results with records are tapped; others are traced too."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    traced = [leaf for leaf in leaves if isinstance(leaf, Traced)]
    operations = traced[0].operations
    plain = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Traced)]
    sizes = [leaf for leaf in leaves if isinstance(leaf, int) and not isinstance(leaf, bool)]
    owner = traced[0].roots[0].owner
    with DisableTorchFunctionSubclass():
        result = _run(func, [leaf.value.detach() if isinstance(leaf, Traced) else leaf for leaf in leaves], spec)
        outputs = differentiable(result)
        if not outputs or not torch.is_grad_enabled():
            return result
        dims, out_dims, rows = operations.locate(owner, [*plain, *sizes], outputs)
        if out_dims[0] is not None and outputs[0].numel() == 0 and rows == 0:
            return result  # it has no rows, so no gradient will arrive
        if out_dims[0] is not None:
            size_dims = iter(dims[len(plain) :])
            marked = [_mark(leaf, size_dims) for leaf in leaves]
            kept = [tensor.detach() for tensor in plain]
            crossing = Crossing(func, marked, spec, list(traced), kept, dims[: len(plain)], out_dims)
            crossing.rows = rows
            return _replaced(result, lambda outs: operations.tap(crossing, outs))
    return _of_parameters(func, leaves, spec, traced)


def _of_parameters(func: Function, leaves: list[Any], spec: pytree.TreeSpec, traced: list[Traced]) -> Any:
    """The results of an operation that meets no records, traced."""
    operations = traced[0].operations
    with DisableTorchFunctionSubclass():
        result = _run(func, [leaf.value if isinstance(leaf, Traced) else leaf for leaf in leaves], spec)
        if not any(output.requires_grad for output in differentiable(result)):
            return result
    roots = tuple({id(r): r for tensor in traced for r in tensor.roots}.values())
    return _replaced(result, lambda outs: tuple(Traced.of(out, roots, operations) for out in outs))


def _run(func: Function, leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return func(*args, **kwargs)


def _replaced(result: Any, change: Callable[[list[Tensor]], tuple[Tensor, ...]]) -> Any:
    leaves, spec = pytree.tree_flatten(result)
    changed = iter(change(differentiable(result)))
    floating = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
    return pytree.tree_unflatten([next(changed) if f else leaf for leaf, f in zip(leaves, floating, strict=True)], spec)


def refuse_mixing(owner: str, operands: list[Any], dims: Dims, out_dims: Dims) -> None:
    """Raise if an operand has records, or was reduced over them before, and a result does not keep them apart."""
    apart = [dim is not None for dim in out_dims]
    tensors = [(x, dim) for x, dim in zip(operands, dims, strict=True) if isinstance(x, Tensor)]
    if all(apart) or not (any(apart) or any(dim is not None or x.requires_grad for x, dim in tensors)):
        return
    raise UnsupportedModule(
        f"module {owner!r} mixes the records where they meet its parameters, so per-sample gradients cannot be computed. "
        "Keep one row per record in every result."
    )


def located_shapes(operands: list[Any], results: list[Tensor]) -> tuple[Shapes, Shapes]:
    """The shapes of an operation's operands and results. A size counts as a tensor of one dimension."""
    shapes = tuple(x.shape if isinstance(x, Tensor) else torch.Size([max(x, 0)]) for x in operands)
    return shapes, tuple(result.shape for result in results)


def _mark(leaf: Any, size_dims: Any) -> Any:
    if isinstance(leaf, Traced):
        return TRACED
    if isinstance(leaf, Tensor):
        return PLAIN
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return leaf if next(size_dims) is None else RECORDS
    return leaf
