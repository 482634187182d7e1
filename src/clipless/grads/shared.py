"""Parameters that a module uses in its own way, outside any known layer: class tokens, positions, scales, attention.

Such a parameter is replaced, while its module runs, by a `Shared` tensor: the same value, known to carry no records. What
is computed from shared tensors alone is shared too. Where one meets the records, in whatever operation, that operation is
tapped: its output's gradient, pulled back record by record, is the parameter's share.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from clipless.errors import UnsupportedModule
from clipless.grads.attention import multi_head_attention
from clipless.grads.entry import Entry
from clipless.grads.layout import Dims
from clipless.grads.pieces import Instantiated, OuterProducts, Piece, Scattered
from clipless.grads.rules.generic import differentiable
from clipless.grads.rules.linear import positions
from clipless.grads.rules.use import at_least_float32
from clipless.grads.writes import WRITES

Function = Callable[..., Any]


@dataclass(frozen=True)
class Root:
    """A parameter as the operations on shared tensors see it: a leaf of a graph of its own."""

    name: str
    owner: str
    value: Tensor


class Operations:
    """What the tape provides: where the records lie in an operation's tensors, and where pieces go. `give_up` is told of a
    module that cannot be taken operation by operation, and returns only if it may still be taken as a whole."""

    def __init__(
        self,
        locate: Callable[[str, list[Any], list[Tensor]], tuple[Dims, Dims]],
        wrap: Callable[["Crossing", list[Tensor]], tuple[Tensor, ...]],
        give_up: Callable[[str, str], None],
    ) -> None:
        self.locate = locate
        self.wrap = wrap
        self.give_up = give_up


class Shared(Tensor):
    """A tensor computed from parameters alone. Every operation on it goes through `__torch_function__`."""

    value: Tensor
    roots: tuple[Root, ...]
    operations: Operations

    @staticmethod
    def of(value: Tensor, roots: tuple[Root, ...], operations: Operations) -> "Shared":
        shared = Tensor._make_subclass(Shared, value.detach())
        shared.value, shared.roots, shared.operations = value, roots, operations
        return shared

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.multi_head_attention_forward:
            return multi_head_attention(*args, **kwargs)
        if func in _CASTS and isinstance(args[0], Shared):
            args, kwargs = _cast(args, kwargs)
        if torch.is_grad_enabled() and _in_place(func, kwargs):
            return _write(func, args, kwargs)
        return _operation(func, args, kwargs)


def root(name: str, owner: str, parameter: Tensor, operations: Operations) -> Shared:
    """A parameter's stand-in while its module runs."""
    leaf = Root(name, owner, parameter.detach().requires_grad_())
    return Shared.of(leaf.value, (leaf,), operations)


_CASTS = {Tensor.to, Tensor.type_as}


def _cast(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """`to(x)` and `type_as(x)` look at x's type and device, not at its records."""
    looks = [x for x in args[1:] if isinstance(x, Tensor)]
    if not looks:
        return args, kwargs
    rest = tuple(x for x in args[1:] if not isinstance(x, Tensor))
    return (args[0], looks[0].device, looks[0].dtype, *rest), kwargs


def _in_place(func: Function, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None


def _write(func: Function, args: Any, kwargs: Any) -> Any:
    """Write shared tensors into one with records: they are spread over these, which is tapped, and written as they are.

    A target without records would have to become shared, and so would all that look at its memory: given up.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    shared = next(leaf for leaf in leaves if isinstance(leaf, Shared))
    owner, target = shared.roots[0].owner, args[0]
    learns = isinstance(target, Shared) or not isinstance(target, Tensor) or target.is_floating_point()
    if learns and func in WRITES and not isinstance(target, Shared):
        (dim,), _ = shared.operations.locate(owner, [target], [target])
        if dim is not None:
            return WRITES[func](target, dim, *args[1:], **kwargs)
    if learns:
        shared.operations.give_up(owner, getattr(func, "__name__", ""))
    with torch._C.DisableTorchFunctionSubclass():
        return _run(func, [leaf.value.detach().clone() if isinstance(leaf, Shared) else leaf for leaf in leaves], spec)


def _operation(func: Function, args: Any, kwargs: Any) -> Any:
    """Run an operation on shared tensors: tapped where it has records, else differentiable towards the parameters."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    shared = [leaf for leaf in leaves if isinstance(leaf, Shared)]
    operations = shared[0].operations
    plain = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Shared)]
    sizes = [leaf for leaf in leaves if isinstance(leaf, int) and not isinstance(leaf, bool)]
    owner = shared[0].roots[0].owner
    with torch._C.DisableTorchFunctionSubclass():
        result = _run(func, [leaf.value.detach() if isinstance(leaf, Shared) else leaf for leaf in leaves], spec)
        outputs = differentiable(result)
        if not outputs or not torch.is_grad_enabled():
            return result
        dims, out_dims = operations.locate(owner, [*plain, *sizes], outputs)
        if out_dims[0] is not None:
            crossing = Crossing(func, leaves, spec, dims, out_dims, len(plain))
            return _replaced(result, lambda outs: operations.wrap(crossing, outs))
        result = _run(func, [leaf.value if isinstance(leaf, Shared) else leaf for leaf in leaves], spec)
        if not any(output.requires_grad for output in differentiable(result)):
            return result
    roots = tuple({id(r): r for tensor in shared for r in tensor.roots}.values())
    return _replaced(result, lambda outs: tuple(Shared.of(out, roots, operations) for out in outs))


def _run(func: Function, leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return func(*args, **kwargs)


def _replaced(result: Any, change: Callable[[list[Tensor]], tuple[Tensor, ...]]) -> Any:
    leaves, spec = pytree.tree_flatten(result)
    changed = iter(change(differentiable(result)))
    floating = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
    return pytree.tree_unflatten([next(changed) if f else leaf for leaf, f in zip(leaves, floating, strict=True)], spec)


def refuse_mixing(owner: str, operands: list[Any], dims: Dims, out_dims: Dims) -> None:
    """Every result has its records apart, or no operand has any and none was reduced over them before."""
    apart = [dim is not None for dim in out_dims]
    tensors = [(x, dim) for x, dim in zip(operands, dims, strict=True) if isinstance(x, Tensor)]
    if all(apart) or not (any(apart) or any(dim is not None or x.requires_grad for x, dim in tensors)):
        return
    raise UnsupportedModule(
        f"module {owner!r} mixes the records where they meet its parameters, so their gradients cannot be told apart. Keep "
        "one row per record in every result."
    )


class Crossing:
    """An operation in which shared tensors meet the records, kept until its gradient arrives."""

    part: object
    entry: Entry | None
    receive: Callable[["Crossing", tuple[Tensor, ...], tuple[Tensor, ...]], None]
    unsure = False

    def settle(self, dims: Dims) -> None:
        """What no probe has seen of an operation is refused, so nothing is left to settle."""

    def __init__(
        self, func: Function, leaves: list[Any], spec: pytree.TreeSpec, dims: Dims, out_dims: Dims, plain: int
    ) -> None:
        self.func, self.spec, self.out_dims = func, spec, out_dims
        self.shared = [leaf for leaf in leaves if isinstance(leaf, Shared)]
        self.owner = self.shared[0].roots[0].owner
        self._tensor_dims, size_dims = list(dims[:plain]), iter(dims[plain:])
        self._tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Shared)]
        self._leaves = [_mark(leaf, size_dims) for leaf in leaves]

    def take_tensors(self) -> list[Tensor]:
        """The plain tensors, given to autograd to keep."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def pieces(self, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[tuple[str, Piece]]:
        """The share of every parameter that the operation's shared tensors come from."""
        grads = tuple(at_least_float32(g.movedim(dim or 0, 0)) for g, dim in zip(grads, self.out_dims, strict=True))
        floats = [at_least_float32(t) if t.is_floating_point() else t for t in tensors]
        quick = _QUICK.get(self.func)
        found = quick(self, floats, grads[0]) if quick else None
        if found is None:
            found = [Instantiated(value) for value in self._pulled_back(floats, grads)]
        return [pair for tensor, piece in zip(self.shared, found, strict=True) for pair in _to_roots(tensor, piece)]

    def records_first(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, self._tensor_dims, strict=True)]

    def arguments(self, shared: list[Any], tensors: list[Any], records: int) -> tuple[Any, Any]:
        """The operation's arguments with these tensors in place of its own, and this number of records in sizes."""
        ours, theirs = iter(shared), iter(tensors)
        places = {_SHARED: ours, _PLAIN: theirs}
        leaves = [next(places[leaf]) if leaf in (_SHARED, _PLAIN) else leaf for leaf in self._leaves]
        leaves = [records if leaf is _RECORDS else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def _pulled_back(self, tensors: list[Tensor], grads: tuple[Tensor, ...]) -> list[Tensor]:
        def inner(shared: list[Tensor], rows: list[Tensor], cotangents: tuple[Tensor, ...]) -> Tensor:
            one = [r if dim is None else r.unsqueeze(dim) for r, dim in zip(rows, self._tensor_dims, strict=True)]
            args, kwargs = self.arguments(shared, one, records=1)
            outputs = differentiable(self.func(*args, **kwargs))
            parts = zip(outputs, self.out_dims, cotangents, strict=True)
            return torch.stack([(out.squeeze(dim or 0) * cotangent).sum() for out, dim, cotangent in parts]).sum()

        values = [at_least_float32(tensor.value.detach()) for tensor in self.shared]
        in_dims = (None, list(self._tensor_dims), tuple(0 for _ in grads))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return vmap(grad(inner), in_dims=in_dims)(values, tensors, grads)


_SHARED, _PLAIN, _RECORDS = (type(name, (), {})() for name in ("SHARED", "PLAIN", "RECORDS"))


def _mark(leaf: Any, size_dims: Any) -> Any:
    if isinstance(leaf, Shared):
        return _SHARED
    if isinstance(leaf, Tensor):
        return _PLAIN
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return leaf if next(size_dims) is None else _RECORDS
    return leaf


def _to_roots(tensor: Shared, piece: Piece) -> list[tuple[str, Piece]]:
    """From the share of a shared tensor to those of the parameters it was computed from."""
    if tensor.value.is_leaf:
        return [(tensor.roots[0].name, piece)]
    values = [root.value for root in tensor.roots]
    cotangents = piece.per_record().to(tensor.value.dtype)
    grads = torch.autograd.grad(
        [tensor.value], values, [cotangents], retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    pairs = zip(tensor.roots, grads, strict=True)
    return [(root.name, Instantiated(at_least_float32(g))) for root, g in pairs if g is not None]


def reduced(grads: Tensor, shape: torch.Size) -> Tensor:
    """Per-record gradients [b, ...] of something that was broadcast, summed to the shape it had before, [b, *shape]."""
    extra = grads.dim() - 1 - len(shape)
    grads = grads.sum(tuple(range(1, 1 + extra))) if extra > 0 else grads
    wide = tuple(k + 1 for k, size in enumerate(shape) if size == 1 and grads.shape[k + 1] != 1)
    return grads.sum(wide, keepdim=True) if wide else grads


def _linear(crossing: Crossing, tensors: list[Tensor], grad_output: Tensor) -> list[Piece] | None:
    args, _ = crossing.arguments([None] * len(crossing.shared), list(tensors), records=1)
    if not args or args[0] is None or args[0].dim() < 2:
        return None
    acts, grads = positions(crossing.records_first(tensors)[0]), positions(grad_output)
    by_rank: dict[int, Piece] = {2: OuterProducts(acts, grads.to(acts.dtype)), 1: Instantiated(grads.sum(1))}
    if len(tensors) > 1 or any(tensor.value.dim() not in by_rank for tensor in crossing.shared):
        return None
    return [by_rank[tensor.value.dim()] for tensor in crossing.shared]


def _embedding(crossing: Crossing, tensors: list[Tensor], grad_output: Tensor) -> list[Piece] | None:
    args, kwargs = crossing.arguments([None] * len(crossing.shared), crossing.records_first(tensors), records=1)
    plain_lookup = all(kwargs.get(name) is None for name in ("padding_idx", "max_norm"))
    if len(crossing.shared) != 1 or len(args) > 2 or not plain_lookup:
        return None
    indices = args[0].flatten(1) if args[0].dim() > 1 else args[0].unsqueeze(1)
    size, width = crossing.shared[0].value.shape
    return [Scattered(indices, grad_output.reshape(*indices.shape, width), size)]


def _spread(crossing: Crossing, tensors: list[Tensor], grad_output: Tensor) -> list[Piece] | None:
    dim = crossing.out_dims[0] or 0
    return [Instantiated(reduced(grad_output.unsqueeze(dim + 1), crossing.shared[0].value.shape))]


def _sum(crossing: Crossing, tensors: list[Tensor], grad_output: Tensor) -> list[Piece] | None:
    args, kwargs = crossing.arguments([None] * len(crossing.shared), list(tensors), records=1)
    if kwargs or len(args) != 2 or len(crossing.shared) != 1:
        return None
    return _spread(crossing, tensors, grad_output)


_QUICK: dict[Function, Callable[[Crossing, list[Tensor], Tensor], list[Piece] | None]] = {
    nn.functional.linear: _linear,
    nn.functional.embedding: _embedding,
    Tensor.expand_as: _spread,
    Tensor.expand: _spread,
    torch.add: _sum,
    Tensor.add: _sum,
    Tensor.__add__: _sum,
    Tensor.__radd__: _sum,
}
