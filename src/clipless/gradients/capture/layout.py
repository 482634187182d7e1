"""The dimension along which the records lie, for every tensor that meets a parameter.

A size that equals the number of records may be a coincidence (32 positions in a batch of 32), and taking positions for
records would bound the wrong norm. So the model is first run twice on other numbers of records: a dimension that changes
its size carries records. Only shapes are kept of these probes, and the random state is restored.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clipless.gradients.records import mask_values
from clipless.gradients.trees import Dims, Shapes, plain_tensors
from clipless.torch_internals import pytree

NOWHERE = -1
OPERATION = ("operand", "result")


class Place(NamedTuple):
    """The inputs or outputs of the n-th call of a module in a forward pass, or the operands or results of the n-th operation
    with its parameters inside a call of the module `inside`."""

    name: str
    call: int
    side: str = "input"
    operation: int = 0
    inside: str = ""

    def output(self) -> "Place":
        """The outputs of the same call."""
        return Place(self.name, self.call, "output")

    def first(self) -> "Place":
        """The same place in the module's first call. Used for calls that no probe saw, such as parts of the model that are
        recomputed in the backward pass."""
        return self._replace(call=1)


class Layout:
    """What probes have found out about the tensors at each place. `strays`: parameters that the last two passes used outside
    their module's forward. `swapped`: modules that ran with other tensors in the place of their parameters. `given_up`:
    modules with operations that cannot be tapped. `reordered`: modules that were called on
    rows that the data chose or put in order."""

    def __init__(self) -> None:
        self._passes: list[dict[Place, Shapes]] = []
        self._sizes: list[int] = []
        self._dependent: set[Place] = set()
        self._dims: dict[Place, Dims] = {}
        self._rows: dict[Place, tuple[bool, ...]] = {}
        self.given_up: set[str] = set()
        self.strays: set[str] = set()
        self.swapped: set[str] = set()
        self.reordered: set[str] = set()

    def forget(self) -> None:
        """Forget everything."""
        self.drop_passes()
        self._dims.clear()
        self._rows.clear()
        self.reordered.clear()
        self.swapped.clear()

    def drop_passes(self) -> None:
        """Forget the probe passes that have not been compared."""
        self._passes, self._sizes, self.given_up = [], [], set()
        self.strays, self._dependent = set(), set()

    def begin_pass(self, size: int) -> None:
        """A probe pass on `size` records begins."""
        self._passes.append({})
        self._sizes.append(size)

    def note(self, place: Place, shapes: Shapes, dependent: bool = False) -> None:
        """Record the shapes at a place in the current pass, and whether any of its tensors depends on the records."""
        self._passes[-1][place] = shapes
        if dependent:
            self._dependent.add(place)

    def give_up(self, name: str) -> None:
        """Record that an operation of this module cannot be tapped."""
        self.given_up.add(name)

    def compare_passes(self) -> set[str]:
        """Compare the two passes. Returns the modules whose operations differed between them, or were given up."""
        (one, other), sizes, given_up, strays = self._passes, tuple(self._sizes), self.given_up, self.strays
        dependent = self._dependent
        self.drop_passes()
        self.strays, self.given_up = strays, given_up
        unstable = given_up | {place.name for place in one.keys() ^ other.keys() if place.side in OPERATION}
        for place in one.keys() & other.keys():
            if len(one[place]) == len(other[place]):
                pairs = zip(one[place], other[place], strict=True)
                self._dims[place] = tuple(_changed_dim(a, b, sizes) for a, b in pairs)
                self._note_rows(place, (one[place], other[place]), sizes)
                if place in dependent and all(dim is None for dim in self._dims[place]):
                    unstable |= self._note_rows_without_dim(place, one[place])
            elif place.side in OPERATION:
                unstable.add(place.name)
            known = self._dims.get(place, ())
            if place.side in OPERATION and (NOWHERE in known or self._uneven(place, one, other, sizes)):
                unstable.add(place.name)
        return unstable

    def _uneven(
        self, place: Place, one: dict[Place, Shapes], other: dict[Place, Shapes], sizes: tuple[int, ...]
    ) -> bool:
        """Whether the number of rows per record differs between the two passes, that is, depends on the data."""
        found = zip(one[place], other[place], self._dims.get(place, ()), strict=False)
        return any(
            dim is not None and dim >= 0 and (len(a) != len(b) or a[dim] * sizes[1] != b[dim] * sizes[0])
            for a, b, dim in found
        )

    def _note_rows(self, place: Place, passes: tuple[Shapes, Shapes], sizes: tuple[int, ...]) -> None:
        """Record which tensors at a place have rows that are not the records."""
        pairs = [_apart(shapes, self._dims[place], size) for shapes, size in zip(passes, sizes, strict=True)]
        rows = tuple(not (one and other) for one, other in zip(*pairs, strict=True))
        if any(rows):
            self._rows[place] = rows
        else:
            self._rows.pop(place, None)

    def _note_rows_without_dim(self, place: Place, shapes: Shapes) -> set[str]:
        """At a place whose tensors depend on the records, in no dimension that both passes tell, the first one holds rows:
        the data decide on their number, or a record comes alone. Returns the module if this is an operation of it."""
        rows = tuple(bool(shape) for shape in shapes)
        if not any(rows):
            return set()
        self._dims[place], self._rows[place] = tuple(0 if some else None for some in rows), rows
        return {place.name} if place.side in OPERATION else set()

    def without_records(self) -> set[str]:
        """The modules that were called at least once without an input that carries records."""
        inputs = {place: dims for place, dims in self._dims.items() if place.side == "input"}
        return {place.name for place, dims in inputs.items() if all(dim is None for dim in dims)}

    def knows(self, place: Place) -> bool:
        """Whether a probe met the place, in this call or the module's first."""
        return self.known(place) is not None

    def known(self, place: Place) -> Dims | None:
        """The dimensions found by probes; None if no probe met the place."""
        return self._dims[place] if place in self._dims else self._dims.get(place.first())

    def learn(self, place: Place, dims: Dims, out_dims: Dims) -> None:
        """Record that the records lie along these dimensions of a call's inputs and outputs."""
        self._dims[place], self._dims[place.output()] = dims, out_dims

    @property
    def has_rows(self) -> bool:
        """Whether any tensor has rows that are not the records."""
        return bool(self._rows)

    def modules_with_rows(self) -> set[str]:
        """The modules that take or return tensors whose rows are not the records."""
        return {place.name for place in self._rows}

    def was_probed(self, place: Place, shapes: Shapes) -> bool:
        """Whether a probe met the place with as many tensors; if not, `dims` goes by sizes alone."""
        return len(self.known(place) or ()) == len(shapes)

    def dims(self, place: Place, shapes: Shapes, records: int) -> Dims | None:
        """The dimension of the records in each tensor at the place, None for a tensor without records. Returns None if the
        rows are not the records."""
        known = self.known(place)
        if known is None or len(known) != len(shapes):
            by_size = dims_by_size(shapes, records)
            unlike = self._rows or self.reordered
            return None if unlike or all(dim is None for dim in by_size) else by_size
        return None if self._has_rows(place) or not all(_apart(shapes, known, records)) else known

    def row_dims(self, place: Place, shapes: Shapes) -> Dims:
        """The dimension of the rows in each tensor at a place whose rows are not the records."""
        known = self.known(place)
        if known is None or len(known) != len(shapes):
            return tuple(0 if shape else None for shape in shapes)
        pairs = zip(shapes, known, strict=True)
        return tuple(None if dim is None or not shape else dim if 0 <= dim < len(shape) else 0 for shape, dim in pairs)

    def has_own_rows(self, place: Place, shapes: Shapes, dims: Dims, records: int) -> tuple[bool, ...]:
        """Which tensors at a place, with rows along `dims`, have rows that are not the records. If no probe met the place,
        a tensor with as many rows as there are records has them if no other tensor has others."""
        sizes = [None if dim is None else shape[dim] for shape, dim in zip(shapes, dims, strict=True)]
        if not self.was_probed(place, shapes):
            every = all(size in (None, records) for size in sizes)
            return tuple(size is not None and (every or size != records) for size in sizes)
        known = self._has_rows(place) or [False] * len(shapes)
        pairs = zip(sizes, known, strict=True)
        return tuple(size is not None and (rows or size != records) for size, rows in pairs)

    def output_dims(self, place: Place, shapes: Shapes, records: int) -> Dims:
        """As `dims`, but with None for each tensor whose rows are not the records."""
        known = self.known(place)
        if known is None or len(known) != len(shapes):
            return tuple(None for _ in shapes)
        apart = _apart(shapes, known, records)
        rows = self._has_rows(place) or [False] * len(known)
        return tuple(dim if own and not other else None for dim, own, other in zip(known, apart, rows, strict=True))

    def _has_rows(self, place: Place) -> tuple[bool, ...] | None:
        """Which tensors at the place have rows that are not the records, in this call or the module's first."""
        return self._rows.get(place if place in self._dims else place.first()) if self._rows else None


def dims_by_size(shapes: Shapes, records: int, multiples: bool = False) -> Dims:
    """For each shape the first dimension of size `records`, or, with `multiples`, of a multiple of it; None without one."""
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
    """A key for calls with the same layout: the structure of the inputs, their ranks, and which masks contain zeros."""
    plain = plain_tensors(values)
    leaves, spec = (plain, "") if plain is not None else pytree.tree_flatten(values)
    about: list[object] = [id(module), module.training, str(spec)]
    for leaf in leaves:
        about += (leaf.dim(), mask_values(leaf)) if isinstance(leaf, Tensor) else (type(leaf).__name__,)
    return tuple(about)


def _changed_dim(one: torch.Size, other: torch.Size, sizes: tuple[int, ...]) -> int | None:
    """The dimension in which a tensor's shape differs between two passes; None if in none, NOWHERE if in several.

    If several differ (the longest sequence may change too), the one whose sizes are the passes' numbers of records counts.
    """
    if one == other:
        return None
    pairs = list(zip(one, other, strict=False))
    changed = [dim for dim, (a, b) in enumerate(pairs) if a != b]
    if len(changed) > 1:
        changed = [dim for dim in changed if pairs[dim] == sizes]
    return changed[0] if len(one) == len(other) and len(changed) == 1 else NOWHERE
