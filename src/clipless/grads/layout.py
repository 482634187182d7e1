"""Where the records are: along which dimension of each tensor they lie, wherever a parameter meets them.

A size that equals the number of records may be a coincidence (a table of 32 positions, a batch of 32), and reading
positions as records would bound the wrong thing. So the first batch is preceded by two passes with other numbers of
records, of which nothing is kept and which leave the random state as it was: what changes its size carries records.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from clipless.errors import UnsupportedModule

Shapes = tuple[torch.Size, ...]
Dims = tuple[int | None, ...]
Reading = dict[int, int]
NOWHERE = -1
OPERATION = ("operand", "result")


class Place(NamedTuple):
    """Inputs or outputs of one call of a module in a forward pass, or operands or results of an operation with its
    parameters: then `call` and `operation` count in the module `inside` which that happens."""

    name: str
    call: int
    side: str = "input"
    operation: int = 0
    inside: str = ""

    def output(self) -> "Place":
        """The outputs of the same call."""
        return Place(self.name, self.call, "output")

    def first(self) -> "Place":
        """The same place in the module's first call, which also stands for calls that no probe saw: a part of the model
        that is computed again in the backward pass."""
        return self._replace(call=1)


class Layout:
    """What has been learned of the tensors at each place: inputs or outputs of a numbered call of a module, operands or
    results of a numbered operation with its parameters."""

    def __init__(self) -> None:
        self._passes: list[dict[Place, Shapes]] = []
        self._sizes: list[int] = []
        self._dims: dict[Place, Dims] = {}
        self._given_up: set[str] = set()

    def forget(self) -> None:
        self.drop()
        self._dims.clear()

    def begin_pass(self, size: int) -> None:
        self._passes.append({})
        self._sizes.append(size)

    def note(self, place: Place, shapes: Shapes) -> None:
        """Remember the shapes that the present pass sees."""
        self._passes[-1][place] = shapes

    def give_up(self, name: str) -> None:
        """An operation of this module in the present pass cannot be tapped."""
        self._given_up.add(name)

    def settle(self) -> set[str]:
        """Compare the two passes. Returns the modules whose operations were not the same in both, or were given up."""
        (one, other), sizes, given_up = self._passes, tuple(self._sizes), self._given_up
        self.drop()
        unstable = given_up | {place.name for place in one.keys() ^ other.keys() if place.side in OPERATION}
        for place in one.keys() & other.keys():
            if len(one[place]) == len(other[place]):
                pairs = zip(one[place], other[place], strict=True)
                self._dims[place] = tuple(_changed_dim(a, b, sizes) for a, b in pairs)
            elif place.side in OPERATION:
                unstable.add(place.name)
            if place.side in OPERATION and NOWHERE in self._dims.get(place, ()):
                unstable.add(place.name)
        return unstable

    def drop(self) -> None:
        """Forget passes, finished or not."""
        self._passes, self._sizes, self._given_up = [], [], set()

    def without_records(self) -> set[str]:
        """The modules of which some call had no input that carries records."""
        inputs = {place: dims for place, dims in self._dims.items() if place.side == "input"}
        return {place.name for place, dims in inputs.items() if all(dim is None for dim in dims)}

    def knows(self, place: Place) -> bool:
        return place in self._dims or place.first() in self._dims

    def sure(self, place: Place, shapes: Shapes) -> bool:
        """Whether the place was met, with as many tensors: else sizes alone say where the records may lie."""
        return len(self._known(place) or ()) == len(shapes)

    def learn(self, place: Place, dims: Dims, out_dims: Dims) -> None:
        """Records lie along these dimensions of a call's inputs and outputs."""
        self._dims[place], self._dims[place.output()] = dims, out_dims

    def _known(self, place: Place) -> Dims | None:
        return self._dims[place] if place in self._dims else self._dims.get(place.first())

    def output_dims(self, place: Place, shapes: Shapes, records: int) -> Dims:
        """As `dims`, with None also where records have no dimension of their own."""
        known = self._known(place)
        if known is None or len(known) != len(shapes):
            return tuple(None for _ in shapes)
        pairs = zip(shapes, known, strict=True)
        return tuple(
            dim if dim is not None and 0 <= dim < len(shape) and shape[dim] == records else None for shape, dim in pairs
        )

    def dims(self, place: Place, shapes: Shapes, records: int) -> Dims:
        """For each tensor at the place the dimension along which its records lie, None if it carries none."""
        known = self._known(place)
        if known is None or len(known) != len(shapes):
            return tuple(shape.index(records) if records in shape else None for shape in shapes)
        for shape, dim in zip(shapes, known, strict=True):
            if dim is not None and (dim == NOWHERE or dim >= len(shape) or shape[dim] != records):
                raise _rows_are_not_records(place, shape, records)
        return known


def _changed_dim(one: torch.Size, other: torch.Size, sizes: tuple[int, ...]) -> int | None:
    """The one dimension in which a tensor's shape differs between two passes; NOWHERE if it is not a single one.

    The longest sequence may differ too: then it is the one dimension of the two passes' numbers of records."""
    if one == other:
        return None
    pairs = list(zip(one, other, strict=False))
    changed = [dim for dim, (a, b) in enumerate(pairs) if a != b]
    if len(changed) > 1:
        changed = [dim for dim in changed if pairs[dim] == sizes]
    return changed[0] if len(one) == len(other) and len(changed) == 1 else NOWHERE


def signature(module: nn.Module, values: Any) -> object:
    """In which way a module is called: another structure of inputs may lead to another layout, and so may a mask that
    leaves something out where another does not."""
    leaves, spec = pytree.tree_flatten(values)
    ranks = tuple(leaf.dim() if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves)
    masks = tuple(_extremes(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    return id(module), module.training, str(spec), ranks, masks


def _extremes(tensor: Tensor) -> tuple[int, int] | None:
    """The smallest and the largest number of a mask, that is of zeros and ones; None for another tensor."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() == 0:
        return None
    least, most = (int(number) for number in tensor.aminmax())
    return (least, most) if least >= 0 and most <= 1 else None


def telling_records(values: Any, reading: Reading) -> list[int]:
    """Records that a probe must have to run as the batch does: of every mask one with a zero and one with a one."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    found: list[int] = []
    for k, dim in reading.items():
        if _extremes(tensors[k]) == (0, 1):
            rows = tensors[k].movedim(dim, 0).reshape(tensors[k].shape[dim], -1).bool()
            for has in (~rows.all(1), rows.any(1)):
                if not bool(has[found].any()):
                    found.append(int(has.int().argmax()))
    return sorted(found)


def telling_sizes(values: Any, module: nn.Module, records: int, least: int = 2) -> tuple[int, int]:
    """Two small numbers of records that are no other size around: not in the inputs, not of a parameter."""
    taken = {size for shape in shapes_of(values) for size in shape if size != records or shape.count(size) > 1}
    taken |= {size for parameter in module.parameters() for size in parameter.shape}
    free = (number for number in count(max(least, 2)) if number not in taken)
    return next(free), next(free)


def _rows_are_not_records(place: Place, shape: torch.Size, records: int) -> UnsupportedModule:
    return UnsupportedModule(
        f"module {place.name!r} has an {place.side} of shape {written(shape, records)}, and its rows are not the records "
        "of a batch of B. clipless needs a dimension of their own for the records: do not flatten them together with "
        "positions, and use other data under torch.no_grad()."
    )


def written(shape: torch.Size, records: int) -> str:
    """A shape for a message, with B where the size is that of the batch, which is nobody's business."""
    return "(" + ", ".join("B" if size == records else str(size) for size in shape) + ")"


def shapes_of(values: Any, floating: bool = False) -> Shapes:
    """Shapes of all tensors in a structure, or of the floating-point ones, in a fixed order.

    The data of a packed sequence counts as having a row for each of its sequences, and its sizes as having none: the
    rules of recurrent layers, which alone are given it, put the records of the one in order by the other.
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
    """The tensors of what most modules return, a tensor, or are given, (tensors, no keywords); None for other things."""
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


def readings(values: Any, records: int) -> Iterator[Reading]:
    """Which tensors of the model's input carry records, and along which dimension: the likeliest reading first.

    That is all tensors with a dimension of that size, the first such; then fewer, since a size may be a coincidence.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    found = {k: tensor.shape.index(records) for k, tensor in enumerate(tensors) if records in tensor.shape}
    for number in range(len(found), 0, -1):
        for chosen in combinations(found, number):
            yield {k: found[k] for k in chosen}


def is_square(values: Any, records: int) -> bool:
    """Whether the second dimension of an input could as well be that of the records, as in time-major sequences of as many
    positions as there are records. The last dimension of floating-point numbers is that of features."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    return any(t.shape[:2] == (records, records) and t.dim() > 1 + t.is_floating_point() for t in tensors)


def resized(values: Any, reading: Reading, target: int, needed: Sequence[int] = ()) -> Any:
    """The structure with its records cut or repeated to `target`, in the same order, the `needed` ones among them."""

    def resize(tensor: Tensor, dim: int) -> Tensor:
        rows = _chosen(tensor.shape[dim], target, needed)
        return tensor.index_select(dim, torch.tensor(rows, dtype=torch.long, device=tensor.device))

    return with_records(values, reading, resize)


def _chosen(records: int, target: int, needed: Sequence[int]) -> list[int]:
    """
    >>> _chosen(6, 3, []), _chosen(6, 3, [3, 5]), _chosen(2, 3, [1])
    ([0, 2, 4], [0, 3, 5], [0, 0, 1])
    """
    even = [k * records // target for k in range(target)]
    missing = [row for row in needed if row not in even]
    spare = [row for row in even if row not in needed]
    return sorted([row for row in even if row in needed] + missing + spare[: max(len(spare) - len(missing), 0)])


def with_records(values: Any, reading: Reading, change: Callable[[Tensor, int], Tensor]) -> Any:
    """The structure with `change(tensor, dim)` in place of the tensors that carry records."""
    numbers = count()

    def changed(leaf: Any) -> Any:
        dim = reading.get(next(numbers)) if isinstance(leaf, Tensor) else None
        return leaf if dim is None else change(leaf, dim)

    return pytree.tree_map(changed, values)


def broken_records(tensor: Tensor, dim: int | None, records: int, masks: bool) -> Tensor | None:
    """The records with data that are not finite, [b], None if there are none or these are no data; -inf counts as finite
    among `masks`."""
    data = tensor.is_floating_point() and not tensor.requires_grad and tensor.numel() > 0
    if not data or dim is None or tensor.shape[dim] != records:
        return None
    rows = tensor.movedim(dim, 0).reshape(records, -1)
    if bool(torch.linalg.vector_norm(rows, dim=1).isfinite().all()):
        return None  # as always; the largest number, which takes longer, does not overflow
    largest = rows.amax(1) if masks else torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    return ~(largest < torch.inf)


def selected(values: Any, reading: Reading, rows: Tensor) -> Any:
    """The structure with these of its records."""
    numbers = count()

    def select(leaf: Any) -> Any:
        dim = reading.get(next(numbers)) if isinstance(leaf, Tensor) else None
        return leaf if dim is None else leaf.index_select(dim, rows.to(leaf.device))

    return pytree.tree_map(select, values)


@contextmanager
def random_state_kept(module: nn.Module) -> Iterator[None]:
    """Whatever is drawn inside, the generators of torch, Python and NumPy are left as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=_cuda_devices(module)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def random_state(module: nn.Module) -> list[Any]:
    """The states of the generators that the module may draw from, to be compared."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in _cuda_devices(module))]
    numpy: Any = np.random.get_state()
    return [*(state.numpy().tobytes() for state in states), random.getstate(), numpy[1].tobytes(), numpy[2:]]


def _cuda_devices(module: nn.Module) -> list[torch.device]:
    return list({parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"})
