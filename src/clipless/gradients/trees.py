"""Tensors in the structures that modules take and return: tuples, dictionaries, packed sequences, plain dataclasses."""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from clipless.torch_internals import pytree

Shapes = tuple[torch.Size, ...]
# For each tensor of a structure, the dimension along which its records lie; None if it carries none.
Dims = tuple[int | None, ...]


def shapes_of(values: Any, floating: bool = False) -> Shapes:
    """Shapes of all tensors in a structure, or of the floating-point ones, in a fixed order.

    The data of a packed sequence counts as one row per sequence, and its batch sizes as a tensor without records: only
    recurrent layers take packed sequences, and their rules put the records in order.
    """
    known = plain_tensors(values)
    if known is not None:
        return tuple(tensor.shape for tensor in known if tensor.is_floating_point() or not floating)
    shapes = []
    for value in pytree.tree_leaves(values, is_leaf=_is_packed):
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        seen = [tensor.shape for tensor in tensors]
        if isinstance(value, PackedSequence):
            seen[:2] = torch.Size([int(value.batch_sizes[0]), *seen[0][1:]]), torch.Size([])
        pairs = zip(tensors, seen, strict=True)
        shapes += [shape for tensor, shape in pairs if tensor.is_floating_point() or not floating]
    return tuple(shapes)


def plain_tensors(values: Any) -> tuple[Tensor, ...] | None:
    """The tensors of a plain output (one tensor) or plain arguments (tensors, no keywords); None for anything else."""
    if isinstance(values, Tensor):
        return (values,)
    if type(values) is tuple and len(values) == 2 and type(values[0]) is tuple and values[1] == {}:
        args: tuple[Any, ...] = values[0]
        return args if all(isinstance(arg, Tensor) for arg in args) else None
    return None


def packed_in(values: Any) -> bool:
    """Whether there is a packed sequence in the structure."""
    return any(map(_is_packed, pytree.tree_leaves(values, is_leaf=_is_packed)))


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def nested_in(values: Any) -> bool:
    """Whether there is a nested tensor in the structure."""
    return any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in pytree.tree_leaves(values))


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
    """The structure with its dataclasses restored, each a copy with the current fields of its tree.

    >>> Point = dataclasses.make_dataclass("Point", ["x", "y"])
    >>> closed(pytree.tree_map(lambda number: number + 1, opened([Point(1, 2), 3])))
    [Point(x=2, y=3), 4]
    """
    if isinstance(values, Tensor) or not any(map(_is_open, pytree.tree_leaves(values, is_leaf=_is_open))):
        return values
    return pytree.tree_map(_close, values, is_leaf=_is_open)


def hides_tensors(values: Any) -> bool:
    """Whether the structure contains no tensor, but an object that may contain one."""
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


def differentiable(output: Any) -> list[Tensor]:
    """The floating-point tensors in a module's output, in a fixed order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    leaves = pytree.tree_leaves(opened(output))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
