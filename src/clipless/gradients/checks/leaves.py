"""The graph behind the losses: its leaves, of which none may be trained without noise, and its path outside the model."""

import gc
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clipless.errors import Misuse
from clipless.gradients.checks.reach import parameter_name

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
    leaves: Sequence[Tensor], known: Collection[int], closely: bool, function: Callable[..., Any] | None
) -> None:
    """Raise if a gradient would reach a tensor that is not released: a parameter, or, which takes a while to find out and
    is looked for `closely` only, another leaf that is kept outside. `known` are the ids of those that may be reached."""
    for leaf in leaves:
        if id(leaf) in known:
            continue
        if isinstance(leaf, nn.Parameter) or (closely and _is_kept(leaf, leaves)):
            raise Misuse(
                f"the losses depend on {_name(leaf, function)}, which requires a gradient and is not part of the private "
                "model, so it would be trained on the records without noise. Make it part of the model before make_private "
                "(a submodule of one nn.Module, its parameters in the same optimizer), or freeze it with "
                "requires_grad_(False)."
            )


def rows_among(leaves: Sequence[Tensor], records: int) -> list[Tensor]:
    """Leaves that may be data of so many records: inputs of which the loop has asked for a gradient."""
    return [leaf for leaf in leaves if records in leaf.shape and not isinstance(leaf, nn.Parameter)]


def _is_kept(leaf: Tensor, ours: Sequence[Tensor]) -> bool:
    """Whether anything but the graph and our own list holds the tensor. A leaf that a function made for itself is gone."""
    holders = (dict, list, tuple, set, types.CellType)
    return any(isinstance(holder, holders) and holder is not ours for holder in gc.get_referrers(leaf))


def _name(leaf: Tensor, function: Callable[..., Any] | None) -> str:
    name = None if function is None else parameter_name(leaf, function)
    kind = "a parameter" if isinstance(leaf, nn.Parameter) else "a tensor"
    return f"{kind} of shape {tuple(leaf.shape)}" if name is None else repr(name)
