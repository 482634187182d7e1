"""Tensors in plain dataclasses, which torch's trees take for leaves."""

import copy
import dataclasses
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


class Opened:
    """A dataclass as a tree of its fields."""

    def __init__(self, original: Any, fields: dict[str, Any]) -> None:
        self.original, self.fields = original, fields


pytree.register_pytree_node(
    Opened,
    lambda node: (list(node.fields.values()), (node.original, tuple(node.fields))),
    lambda values, context: Opened(context[0], dict(zip(context[1], values, strict=True))),
)


def opened(values: Any) -> Any:
    """The structure with every dataclass in it replaced by a tree of its fields."""
    if isinstance(values, Tensor) or not any(map(_is_plain, pytree.tree_leaves(values))):
        return values
    return pytree.tree_map(_open, values)


def closed(values: Any) -> Any:
    """The structure with the dataclasses put back, each a copy with the fields that the tree has now.

    >>> Point = dataclasses.make_dataclass("Point", ["x", "y"])
    >>> closed(pytree.tree_map(lambda number: number + 1, opened([Point(1, 2), 3])))
    [Point(x=2, y=3), 4]
    """
    if isinstance(values, Tensor) or not any(map(_is_open, pytree.tree_leaves(values, is_leaf=_is_open))):
        return values
    return pytree.tree_map(_close, values, is_leaf=_is_open)


def hides_tensors(values: Any) -> bool:
    """Whether there is an object in the structure that tensors may be in, and not a tensor in sight."""
    leaves = pytree.tree_leaves(values)
    plain = (bool, int, float, complex, str, bytes, type(None))
    return not any(isinstance(leaf, Tensor) for leaf in leaves) and any(not isinstance(leaf, plain) for leaf in leaves)


def _is_plain(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _is_open(value: Any) -> bool:
    return isinstance(value, Opened)


def _open(leaf: Any) -> Any:
    if not _is_plain(leaf):
        return leaf
    names = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
    return Opened(leaf, {name: opened(getattr(leaf, name)) for name in names})


def _close(leaf: Any) -> Any:
    if not _is_open(leaf):
        return leaf
    made = copy.copy(leaf.original)
    for name, value in leaf.fields.items():
        object.__setattr__(made, name, closed(value))
    return made
