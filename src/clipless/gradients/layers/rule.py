"""The arguments of a layer rule, and the registry of layer rules."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from clipless.errors import UnsupportedModule
from clipless.gradients.forms import Form
from clipless.gradients.layers.batching import batch_dims
from clipless.gradients.trees import Dims, plain_tensors
from clipless.torch_internals import OldSpectralNorm, pytree


class Use(NamedTuple):
    """One call of a module in the forward pass, for its rule in the backward pass.

    `input` is the first tensor of the input, records first, and in at least float32 if it is floating-point; so are the
    gradients that a rule takes. `dims` and `out_dims` have the dimension of the records in each tensor of the input and the
    output, None without records. `kept` is what a takeover has saved in the forward pass.
    """

    module: nn.Module
    input: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dims: Dims
    out_dims: Dims
    wanted: tuple[str, ...]
    records: int
    kept: Any = None

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors of the input, records first, in at least float32 if they are floating-point."""
        arguments = (self.args, dict(self.kwargs))
        known = plain_tensors(arguments)
        tensors = known or [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        moved = [t.movedim(dim, 0) if dim else t for t, dim in zip(tensors, self.dims, strict=True)]
        return [at_least_float32(t) if t.is_floating_point() else t for t in moved]

    @property
    def arguments(self) -> dict[str, Any]:
        """What `forward` was called with, by the names of its arguments, the tensors as in `inputs`."""
        tensors = iter(self.inputs)
        args, kwargs = pytree.tree_map(
            lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf, (self.args, dict(self.kwargs))
        )
        return inspect.signature(self.module.forward).bind(*args, **kwargs).arguments

    def batched_by_one(self, out_ranks: tuple[int, ...]) -> "Use":
        """The same use with a batch dimension of one record in every tensor, for a layer that was called on one record
        without. `out_ranks` are the numbers of dimensions of its outputs, without that one."""
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        ranks = tuple(leaf.dim() + 1 for leaf in leaves if isinstance(leaf, Tensor))
        dims = batch_dims(self.module, ranks)
        left = iter(dims)
        leaves = [leaf.unsqueeze(next(left) or 0) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        out_dims = batch_dims(self.module, tuple(rank + 1 for rank in out_ranks))
        return self._replace(
            input=self.input.unsqueeze(0), args=args, kwargs=kwargs, dims=dims, out_dims=out_dims, records=1
        )

    def batched(self, rank: int = 0) -> Tensor:
        """The input of a layer whose batch is dimension 0.

        Raises if the records lie along another dimension, where the layer would mix them, or if the input has fewer than
        `rank` dimensions, so that the layer treats it as a single record.
        """
        if self.dims[0] != 0 or self.input.dim() < rank:
            raise UnsupportedModule(
                f"{self.module} does not treat the dimension along which the records lie as the batch, so per-sample "
                "gradients cannot be computed. Give it the records in the first dimension and all other dimensions "
                "of its input."
            )
        return self.input


def positional(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `forward` is called with, by position as far as possible and so in one order, however the caller wrote it."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError:
        return args, kwargs  # the module will refuse that itself
    return bound.args, bound.kwargs


LayerRule = Callable[[Use, tuple[Tensor, ...]], dict[str, Form]]

REGISTRY: dict[type[nn.Module], LayerRule] = {}
NAMED: dict[str, LayerRule] = {}


def register(*kinds: type[nn.Module]) -> Callable[[LayerRule], LayerRule]:
    """Decorator: use this rule for these classes, and for subclasses that do not override `forward`."""

    def enter(rule: LayerRule) -> LayerRule:
        REGISTRY.update(dict.fromkeys(kinds, rule))
        return rule

    return enter


def register_named(*kinds: str) -> Callable[[LayerRule], LayerRule]:
    """As `register`, for classes of packages that clipless does not import: "package.module.Class"."""

    def enter(rule: LayerRule) -> LayerRule:
        NAMED.update(dict.fromkeys(kinds, rule))
        return rule

    return enter


def rule_of(module: nn.Module) -> LayerRule | None:
    """The rule registered for the module's class, or for the class it inherits its whole computation from."""
    if parametrized(module) or reweighted(module):
        return None
    for kind in type(module).__mro__:
        rule = REGISTRY.get(kind) or NAMED.get(f"{kind.__module__}.{kind.__qualname__}")
        if rule is not None and _same_computation(module, kind):
            return rule
    return None


def parametrized(module: nn.Module) -> bool:
    """Whether torch computes the module's weights from other parameters at each access."""
    return torch.nn.utils.parametrize.is_parametrized(module)


def reweighted(module: nn.Module, weight: str | None = None) -> bool:
    """Whether a hook of old-style weight norm or spectral norm computes this weight, or any, of the module before each
    call."""
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, WeightNorm | OldSpectralNorm) and weight in (None, hook.name) for hook in hooks)


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in its own type, or in float32 if that is narrower."""
    if tensor.dtype is torch.float32 or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _same_computation(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module computes what the class does: nothing was overridden in a subclass or on the object itself."""
    inherited = ("forward", "_conv_forward", "_apply_instance_norm")
    cls = type(module)
    return all(name not in vars(module) and getattr(cls, name, None) is getattr(kind, name, None) for name in inherited)
