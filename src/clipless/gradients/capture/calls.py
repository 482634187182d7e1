"""A call of a module in the forward pass, as it is kept for the backward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clipless.gradients.capture.model_map import Layer
from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.trees import Dims, Shapes
from clipless.torch_internals import pytree


@dataclass(slots=True)
class Call:
    """A call of a module whose output is tapped. Autograd saves its tensors and checks their versions.

    `wanted`: the parameters whose gradients are computed. Without a `spec` the module was called with `tensors` alone; with
    one, `leaves` are its flattened arguments and what a takeover saved. `unsure`: where the records lie is known from sizes
    alone; seeds then decide, and `learn` remembers it for inputs of these `shapes`. With `rows`, the call has that many
    rows, in any order, along the dimensions given (without a dimension the whole tensor is one row), and seeds identify
    the `record` of each; inputs that are `by_record` have a slice for each record, and not for each row.
    """

    receive: Callable[["Call", tuple[Tensor, ...], tuple[Tensor, ...]], None]
    micro: object
    forward_pass: ForwardPass | None
    layer: Layer
    owner: str
    wanted: dict[str, str]
    dims: Dims
    out_dims: Dims
    tensors: tuple[Tensor, ...]
    leaves: list[Any]
    spec: pytree.TreeSpec | None = None
    unsure: bool = False
    shapes: Shapes = ()
    learn: Callable[[Dims, Dims], None] | None = None
    rows: int = 0
    by_record: tuple[bool, ...] = ()
    record: Tensor | None = None

    def settle(self, dims: Dims) -> None:
        """The records lie along these dimensions of the outputs, and of the inputs that have the same size there."""
        (old, *_), (new, *_) = self.out_dims, dims
        if old != new and old is not None and new is not None:
            moved = [
                new if dim == old and len(shape) > max(old, new) and shape[new] == shape[old] else dim
                for dim, shape in zip(self.dims, self.shapes, strict=True)
            ]
            self.dims = tuple(moved)
        self.out_dims, self.unsure = dims, False
        if self.learn is not None:
            self.learn(self.dims, self.out_dims)

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any], saved: Any) -> None:
        """Keep these arguments, and what a takeover saved."""
        leaves, self.spec = pytree.tree_flatten((args, kwargs, saved))
        self.tensors = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor))
        self.leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def unflatten(self, tensors: tuple[Tensor, ...]) -> tuple[Any, Any, Any]:
        """The module's arguments, by position and by name, and what a takeover saved."""
        if self.spec is None:
            return tensors, {}, None
        values = iter(tensors)
        leaves = [next(values) if leaf is _TENSOR else leaf for leaf in self.leaves]
        args, kwargs, saved = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs, saved


_TENSOR = object()
