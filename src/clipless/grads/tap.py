"""The tap on a module's output, and hooks that stay behind when a model is copied."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from clipless.errors import Misuse, UnsupportedModule
from clipless.grads.entry import Entry
from clipless.grads.layout import Dims, Shapes
from clipless.grads.refusals import refuse_compiled_pass


@dataclass
class Call:
    """What a tap needs to know when its gradient arrives. Tensors are kept by autograd, which watches their versions.

    `unsure` is set where the records were found by the sizes of the inputs' `shapes` and of the outputs alone: the seeds
    then tell, and `learn` remembers it.
    """

    receive: Callable[["Call", tuple[Tensor, ...], tuple[Tensor, ...]], None]
    part: object
    entry: Entry | None
    module: nn.Module
    owner: str
    wanted: Mapping[str, str]
    dims: Dims
    out_dims: Dims
    leaves: list[Any]
    spec: pytree.TreeSpec | None
    unsure: bool = False
    shapes: Shapes = ()
    learn: Callable[[Dims, Dims], None] | None = None

    def settle(self, dims: Dims) -> None:
        """The outputs' records lie along these dimensions, and so do those of the inputs that have as many there."""
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

    def take_tensors(self) -> list[Tensor]:
        tensors = [leaf.detach() for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.leaves[:] = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tensors

    def rebuild(self, tensors: tuple[Tensor, ...]) -> tuple[Any, Any, Any]:
        """The module's arguments, by position and by name, and what a takeover kept."""
        if self.spec is None:
            return tensors, {}, None
        values = iter(tensors)
        leaves = [next(values) if leaf is _TENSOR else leaf for leaf in self.leaves]
        args, kwargs, kept = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs, kept


_TENSOR = object()


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any], kept: Any) -> tuple[list[Any], pytree.TreeSpec | None]:
    """What a module was called with and what a takeover kept, as leaves. Without a spec it was called with tensors."""
    if kept is None and not kwargs and all(isinstance(arg, Tensor) for arg in args):
        return list(args), None
    return pytree.tree_flatten((args, kwargs, kept))


class Tap(torch.autograd.Function):
    """Identity on a module's outputs. `detach` shares storage and version, and is not a view: in-place use works."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*call.take_tensors())
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.call.receive(ctx.call, ctx.saved_tensors, grads)
        return (None, None, *grads)


class Root(torch.autograd.Function):
    """Identity on the outputs of the outermost module, when the pass is checked: nothing goes further before the check is
    done. Outputs that no gradient arrives at have none."""

    @staticmethod
    def forward(ctx: Any, receive: Callable[[tuple[Tensor | None, ...]], None], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.receive(grads)
        return (None, *grads)


class Unscriptable(Misuse, AttributeError):
    """A hook has no name that TorchScript could call it by."""


class Hook:
    """A hook that stays behind when its model is copied or pickled: the copy is a plain model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        refuse_compiled_pass()
        return self.function(*args)

    @property
    def __name__(self) -> str:
        raise Unscriptable(
            "torch.jit.script of a private model: its hooks cannot be compiled. Script a copy (copy.deepcopy(model))."
        )

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _left_behind, ()


def _left_behind() -> Callable[..., None]:
    return _no_hook


def _no_hook(*args: Any) -> None:
    """What is left of a hook in a copy of the model."""


class Busy:
    """Whether modules are run by the library itself, beside training."""

    now = False


def refuse_stray(name: str, busy: Busy) -> Callable[[Tensor], None]:
    def stray(grad: Tensor) -> None:
        if busy.now:
            return
        raise UnsupportedModule(
            f"parameter {name!r} was used outside its module's forward, so its gradient cannot be told apart by record. "
            "Call the module that owns it, or move the parameter into a small module with a forward of its own."
        )

    return stray
