"""The leaves of the graph behind the losses: what outside the released parameters would be trained without noise."""

import gc
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn

from clipless.errors import Misuse
from clipless.gradients.capture.hooks import Tap

_TAP = Tap._backward_cls


def leaves_behind(losses: Tensor, everywhere: bool) -> Iterator[Tensor]:
    """The leaves of the graph that require a gradient; without `everywhere` only those that no tap is above of, which are
    outside of the private model."""
    node = losses.grad_fn
    waiting: list[Any] = [] if node is None else [node]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        if not everywhere and type(node) is _TAP:
            continue
        for follower, _ in node.next_functions:
            if follower is not None and follower not in seen:
                seen.add(follower)
                waiting.append(follower)


def refuse_foreign_leaves(
    losses: Tensor, known: Collection[int], everywhere: bool, function: Callable[..., Any] | None, batch: Any
) -> None:
    """Raise if a gradient would reach a tensor that is not released: a parameter, or another leaf that is kept outside.
    `known` are the ids of those that may be reached."""
    for leaf in leaves_behind(losses, everywhere):
        if id(leaf) not in known and (isinstance(leaf, nn.Parameter) or _is_kept(leaf, batch)):
            raise Misuse(
                f"the losses depend on {_name(leaf, function)}, which requires a gradient and is not part of the private "
                "model, so it would be trained on the records without noise. Make it part of the model before make_private "
                "(a submodule of one nn.Module, its parameters in the same optimizer), or freeze it with "
                "requires_grad_(False)."
            )


def _is_kept(leaf: Tensor, batch: Any) -> bool:
    """Whether anything but the graph and the batch holds the tensor. A leaf that a function made for itself is gone."""
    own = {id(container) for container in _containers(batch)}
    holders = (dict, list, tuple, set, types.CellType)
    return any(isinstance(holder, holders) and id(holder) not in own for holder in gc.get_referrers(leaf))


def _containers(batch: Any) -> Iterator[Any]:
    if isinstance(batch, dict | list | tuple):
        yield batch
        for value in batch.values() if isinstance(batch, dict) else batch:
            yield from _containers(value)


def reachable(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What a function can reach by name: its closure, the globals that it mentions, and the attributes of its object."""
    bound = getattr(function, "__self__", None)
    inner = getattr(function, "func", function)  # functools.partial
    inner = getattr(inner, "__func__", inner)
    code = getattr(inner, "__code__", None)
    if bound is not None and not isinstance(bound, types.ModuleType):
        yield from (
            ((f"self.{name}", value) for name, value in vars(bound).items()) if hasattr(bound, "__dict__") else ()
        )
    if code is None:
        return
    for name, cell in zip(code.co_freevars, getattr(inner, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in code.co_names:
        if name in inner.__globals__:
            yield name, inner.__globals__[name]


def _name(leaf: Tensor, function: Callable[..., Any] | None) -> str:
    kind = "a parameter" if isinstance(leaf, nn.Parameter) else "a tensor"
    for name, value in reachable(function) if function is not None else ():
        if value is leaf:
            return f"{name!r}"
        for inner, parameter in value.named_parameters() if isinstance(value, nn.Module) else ():
            if parameter is leaf:
                return f"{f'{name}.{inner}'!r}"
        if isinstance(value, list | tuple | dict):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                held = item.named_parameters() if isinstance(item, nn.Module) else (("", item),)
                for inner, parameter in held:
                    if parameter is leaf:
                        return f"{f'{name}[{key!r}]' + ('.' + inner if inner else '')!r}"
    return f"{kind} of shape {tuple(leaf.shape)}"
