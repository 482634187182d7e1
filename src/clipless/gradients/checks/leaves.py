"""The graph behind the losses: its leaves, of which none may be trained without noise, and its path outside the model."""

import gc
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from clipless.errors import Misuse
from clipless.sampling.rows import tensors_of

# The pairs of operations that follow each other in a graph.
Path = frozenset[tuple[type, type]]


class LossGraph:
    """The graph behind some losses: its `leaves`, up to the operations at which the model `stops` or `everywhere`, and its
    `path`, the pairs of operations outside the model that follow each other. Another path is another computation."""

    def __init__(self, losses: Tensor, stops: Collection[type], everywhere: bool = False) -> None:
        self.leaves: list[Tensor] = []
        pairs: set[tuple[type, type]] = set()
        self._walk([losses.grad_fn], stops, pairs)
        self.path: Path = frozenset(pairs)
        if everywhere:
            self.leaves.clear()
            self._walk([losses.grad_fn], (), set())

    def _walk(self, waiting: list[Any], stops: Collection[type], pairs: set[tuple[type, type]]) -> None:
        """Go through the graph from these nodes, and add its leaves and pairs."""
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            kind = type(node)
            if kind is _LEAF:
                self.leaves.append(node.variable)
            elif kind not in stops:
                for follower, _ in node.next_functions:
                    if follower is not None:
                        pairs.add((kind, _MODEL if type(follower) in stops else type(follower)))
                        if follower not in seen:
                            seen.add(follower)
                            waiting.append(follower)


def _leaf_node() -> Any:
    """The node at which autograd adds up the gradient of a leaf."""
    return (torch.zeros((), device="cpu", requires_grad=True) + 1).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


_LEAF, _MODEL = type(_leaf_node()), Tensor


def refuse_foreign_leaves(
    leaves: Iterable[Tensor], known: Collection[int], function: Callable[..., Any] | None, batch: Any
) -> None:
    """Raise if a gradient would reach a tensor that is not released: a parameter or, where the function and its batch are
    known, another leaf that is kept outside. `known` are the ids of those that may be reached."""
    for leaf in leaves:
        other = id(leaf) not in known
        if other and (isinstance(leaf, nn.Parameter) or (function is not None and _is_kept(leaf, batch))):
            raise Misuse(
                f"the losses depend on {_name(leaf, function)}, which requires a gradient and is not part of the private "
                "model, so it would be trained on the records without noise. Make it part of the model before make_private "
                "(a submodule of one nn.Module, its parameters in the same optimizer), or freeze it with "
                "requires_grad_(False)."
            )


def _is_kept(leaf: Tensor, batch: Any) -> bool:
    """Whether anything but the graph and the batch holds the tensor. A leaf that a function made for itself is gone."""
    if any(leaf is tensor for tensor in tensors_of(batch)):
        return False
    holders = (dict, list, tuple, set, types.CellType)
    return any(isinstance(holder, holders) for holder in gc.get_referrers(leaf))


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
