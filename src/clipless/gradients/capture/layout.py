"""Along which dimension of each tensor the records lie, wherever a parameter meets them.

A size that equals the number of records may be a coincidence (a table of 32 positions, a batch of 32), and reading
positions as records would bound the wrong thing. So two probe passes with other numbers of records precede the first
batch: what changes its size carries records. Nothing else is kept of a probe, and it leaves the random state as it was.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from clipless.gradients.records import mask_values
from clipless.gradients.trees import Dims, Shapes, plain_tensors

NOWHERE = -1
OPERATION = ("operand", "result")


class Place(NamedTuple):
    """The inputs or outputs of a module's numbered call in a forward pass, or the operands or results of a numbered
    operation with its parameters; then `call` and `operation` count within the module `inside` which that happens."""

    name: str
    call: int
    side: str = "input"
    operation: int = 0
    inside: str = ""

    def output(self) -> "Place":
        """The outputs of the same call."""
        return Place(self.name, self.call, "output")

    def first(self) -> "Place":
        """The same place in the module's first call. It stands for calls that no probe saw: parts of the model that are
        computed again in the backward pass."""
        return self._replace(call=1)


class Layout:
    """What probes have taught about the tensors at each place. `strays` are the parameters that the last two passes used
    outside their module's forward, and `given_up` the modules with operations that cannot be tapped."""

    def __init__(self) -> None:
        self._passes: list[dict[Place, Shapes]] = []
        self._sizes: list[int] = []
        self._dims: dict[Place, Dims] = {}
        self._rows: dict[Place, tuple[bool, ...]] = {}
        self.given_up: set[str] = set()
        self.strays: set[str] = set()

    def forget(self) -> None:
        """Forget everything."""
        self.drop_passes()
        self._dims.clear()
        self._rows.clear()

    def drop_passes(self) -> None:
        """Forget probe passes, finished or not."""
        self._passes, self._sizes, self.given_up = [], [], set()
        self.strays = set()

    def begin_pass(self, size: int) -> None:
        """A probe pass on `size` records begins."""
        self._passes.append({})
        self._sizes.append(size)

    def note(self, place: Place, shapes: Shapes) -> None:
        """Remember the shapes that the present pass sees."""
        self._passes[-1][place] = shapes

    def give_up(self, name: str) -> None:
        """An operation of this module in the present pass cannot be tapped."""
        self.given_up.add(name)

    def settle(self) -> set[str]:
        """Compare the two passes. Returns the modules whose operations differed between them, or were given up."""
        (one, other), sizes, given_up, strays = self._passes, tuple(self._sizes), self.given_up, self.strays
        self.drop_passes()
        self.strays, self.given_up = strays, given_up
        unstable = given_up | {place.name for place in one.keys() ^ other.keys() if place.side in OPERATION}
        for place in one.keys() & other.keys():
            if len(one[place]) == len(other[place]):
                pairs = zip(one[place], other[place], strict=True)
                self._dims[place] = tuple(_changed_dim(a, b, sizes) for a, b in pairs)
                self._note_rows(place, (one[place], other[place]), sizes)
            elif place.side in OPERATION:
                unstable.add(place.name)
            known = self._dims.get(place, ())
            if place.side in OPERATION and (NOWHERE in known or self._uneven(place, one, other, sizes)):
                unstable.add(place.name)
        return unstable

    def _uneven(
        self, place: Place, one: dict[Place, Shapes], other: dict[Place, Shapes], sizes: tuple[int, ...]
    ) -> bool:
        """Whether a place has other numbers of rows for each record in the two passes: data decide on them."""
        found = zip(one[place], other[place], self._dims.get(place, ()), strict=False)
        return any(dim is not None and dim >= 0 and a[dim] * sizes[1] != b[dim] * sizes[0] for a, b, dim in found)

    def _note_rows(self, place: Place, passes: tuple[Shapes, Shapes], sizes: tuple[int, ...]) -> None:
        """Remember which tensors at a place have other rows than the records, if any."""
        pairs = [_apart(shapes, self._dims[place], size) for shapes, size in zip(passes, sizes, strict=True)]
        rows = tuple(not (one and other) for one, other in zip(*pairs, strict=True))
        if any(rows):
            self._rows[place] = rows
        else:
            self._rows.pop(place, None)

    def without_records(self) -> set[str]:
        """The modules of which some call had no input that carries records."""
        inputs = {place: dims for place, dims in self._dims.items() if place.side == "input"}
        return {place.name for place, dims in inputs.items() if all(dim is None for dim in dims)}

    def knows(self, place: Place) -> bool:
        """Whether the place was met, in this call or the module's first."""
        return self.known(place) is not None

    def known(self, place: Place) -> Dims | None:
        """What was learned of a place; None if it was never met."""
        return self._dims[place] if place in self._dims else self._dims.get(place.first())

    def learn(self, place: Place, dims: Dims, out_dims: Dims) -> None:
        """Records lie along these dimensions of a call's inputs and outputs."""
        self._dims[place], self._dims[place.output()] = dims, out_dims

    @property
    def has_rows(self) -> bool:
        """Whether records lie together with positions anywhere."""
        return bool(self._rows)

    def modules_with_rows(self) -> set[str]:
        """The modules that take or return records which lie together with positions."""
        return {place.name for place in self._rows}

    def sure(self, place: Place, shapes: Shapes) -> bool:
        """Whether the place was met with as many tensors; if not, `dims` goes by sizes alone."""
        return len(self.known(place) or ()) == len(shapes)

    def dims(self, place: Place, shapes: Shapes, records: int) -> Dims | None:
        """For each tensor at the place the dimension along which its records lie, None if it carries none. None altogether
        if its rows are not the records."""
        known = self.known(place)
        if known is None or len(known) != len(shapes):
            by_size = dims_by_size(shapes, records)
            return None if self._rows or all(dim is None for dim in by_size) else by_size
        return None if self._has_rows(place) or not all(_apart(shapes, known, records)) else known

    def row_dims(self, place: Place, shapes: Shapes) -> Dims:
        """For each tensor at a place whose rows are not the records the dimension along which these rows lie."""
        known = self.known(place)
        if known is None or len(known) != len(shapes):
            return tuple(0 if shape else None for shape in shapes)
        pairs = zip(shapes, known, strict=True)
        return tuple(None if dim is None or not shape else dim if 0 <= dim < len(shape) else 0 for shape, dim in pairs)

    def output_dims(self, place: Place, shapes: Shapes, records: int) -> Dims:
        """As `dims`, with None also where records have no dimension of their own."""
        known = self.known(place)
        if known is None or len(known) != len(shapes):
            return tuple(None for _ in shapes)
        apart = _apart(shapes, known, records)
        rows = self._has_rows(place) or [False] * len(known)
        return tuple(dim if own and not other else None for dim, own, other in zip(known, apart, rows, strict=True))

    def _has_rows(self, place: Place) -> tuple[bool, ...] | None:
        """Which tensors at the place have other rows than the records, in this call or the module's first."""
        return self._rows.get(place if place in self._dims else place.first()) if self._rows else None


def dims_by_size(shapes: Shapes, records: int, multiples: bool = False) -> Dims:
    """For each shape the first dimension of that size, or else the first of a multiple of it if these count; None if it
    has none."""
    if not multiples:
        return tuple(shape.index(records) if records in shape else None for shape in shapes)
    found = [
        [k for k, size in enumerate(shape) if size == records]
        + [k for k, size in enumerate(shape) if size and size % records == 0]
        for shape in shapes
    ]
    return tuple(dims[0] if dims else None for dims in found)


def _apart(shapes: Shapes, dims: Dims, records: int) -> list[bool]:
    """Which tensors have as many rows as there are records along these dimensions, or carry no records."""
    pairs = zip(shapes, dims, strict=True)
    return [dim is None or (0 <= dim < len(shape) and shape[dim] == records) for shape, dim in pairs]


def signature(module: nn.Module, values: Any) -> object:
    """What decides how a call of a module is laid out: the structure of its inputs, their ranks, and which masks leave
    something out."""
    plain = plain_tensors(values)
    leaves, spec = (plain, "") if plain is not None else pytree.tree_flatten(values)
    about: list[object] = [id(module), module.training, str(spec)]
    for leaf in leaves:
        about += (leaf.dim(), mask_values(leaf)) if isinstance(leaf, Tensor) else (type(leaf).__name__,)
    return tuple(about)


def _changed_dim(one: torch.Size, other: torch.Size, sizes: tuple[int, ...]) -> int | None:
    """The one dimension in which a tensor's shape differs between two passes; NOWHERE if it is not a single one.

    The longest sequence may differ too: then it is the dimension that has the two passes' numbers of records."""
    if one == other:
        return None
    pairs = list(zip(one, other, strict=False))
    changed = [dim for dim, (a, b) in enumerate(pairs) if a != b]
    if len(changed) > 1:
        changed = [dim for dim in changed if pairs[dim] == sizes]
    return changed[0] if len(one) == len(other) and len(changed) == 1 else NOWHERE
