"""Where the records lie in a collated batch, and batches of some of its records.

Checks run a training step's function again on other records, and `private.step` splits batches: both need the same batch
with some of its rows. Tensors are indexed along their batch dimension. A sequence that is no tensor and has one entry for
each record (names, annotations) is indexed too.
"""

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# For each tensor of a batch, in order, the dimension along which its records lie; None if it has no rows of records.
BatchDims = tuple[int | None, ...]


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors of a batch: of tuples, lists and mappings, however nested, in a fixed order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in tensors_of(value)]
    if isinstance(batch, tuple | list):
        return [tensor for value in batch for tensor in tensors_of(value)]
    return []


def is_tree(batch: Any) -> bool:
    """Whether a batch consists of tensors in tuples, lists and mappings, so that its rows can be chosen."""
    if isinstance(batch, Mapping):
        return all(map(is_tree, batch.values()))
    if isinstance(batch, tuple | list):
        return all(map(is_tree, batch))
    return isinstance(batch, Tensor | str | bytes | int | float | bool | None)


def learned_dims(one: Any, two: Any) -> BatchDims | None:
    """Where the records lie, from the same sample collated once and twice; None if that cannot be told.

    >>> learned_dims(torch.ones(5, 1, 3), torch.ones(5, 2, 3))
    (1,)
    >>> learned_dims([torch.ones(7, 3), torch.ones(4)], [torch.ones(14, 3), torch.ones(4)]) is None
    True
    """
    pairs = list(zip(tensors_of(one), tensors_of(two), strict=False))
    if len(tensors_of(one)) != len(tensors_of(two)) or any(a.dim() != b.dim() for a, b in pairs):
        return None
    dims: list[int | None] = []
    for a, b in pairs:
        changed = [dim for dim in range(a.dim()) if a.shape[dim] != b.shape[dim]]
        if len(changed) > 1 or any((a.shape[dim], b.shape[dim]) != (1, 2) for dim in changed):
            return None
        dims += changed or [None]
    return tuple(dims)


def likely_dims(batch: Any, records: int) -> BatchDims:
    """Where the records probably lie: along the first dimension of their number."""
    shapes = [tuple(tensor.shape) for tensor in tensors_of(batch)]
    return tuple(shape.index(records) if records in shape else None for shape in shapes)


@dataclass(frozen=True)
class BatchRows:
    """A batch of so many records, of which the rows can be chosen. It is not `certain` where these are if another dimension
    has as many."""

    batch: Any
    records: int
    dims: BatchDims
    certain: bool = True

    @property
    def usable(self) -> bool:
        """Whether every tensor is what `dims` says, and some tensor has rows at all."""
        tensors = tensors_of(self.batch)
        fits = len(tensors) == len(self.dims) and all(
            dim is None or tensor.shape[dim : dim + 1] == (self.records,)
            for tensor, dim in zip(tensors, self.dims, strict=True)
        )
        return fits and is_tree(self.batch) and any(dim is not None for dim in self.dims)

    def chosen(self, rows: Tensor) -> Any:
        """The batch with these of its records, in this order."""
        return self._chosen(self.batch, rows, iter(self.dims))

    def _chosen(self, value: Any, rows: Tensor, dims: Any) -> Any:
        if isinstance(value, Tensor):
            dim = next(dims)
            return value if dim is None else value.index_select(dim, rows.to(value.device))
        if isinstance(value, Mapping):
            return rebuilt(value, [self._chosen(item, rows, dims) for item in value.values()])
        if isinstance(value, tuple | list):
            if len(value) == self.records and not tensors_of(value):
                return rebuilt(value, [value[row] for row in rows.tolist()])
            return rebuilt(value, [self._chosen(item, rows, dims) for item in value])
        return value


def rows_of(batch: Any, records: int, known: BatchDims | None) -> BatchRows | None:
    """A batch with its rows: where the loader knows them to be if that fits, else where they probably are. None if they are
    nowhere to be seen."""
    if known is not None:
        rows = BatchRows(batch, records, known)
        if rows.usable:
            return rows
    certain = all(tuple(tensor.shape).count(records) <= 1 for tensor in tensors_of(batch))
    rows = BatchRows(batch, records, likely_dims(batch, records), certain)
    return rows if rows.usable else None


def rebuilt(like: Any, values: Sequence[Any]) -> Any:
    """A mapping, a list or a tuple of the same type with other values."""
    if isinstance(like, Mapping):
        pairs = dict(zip(like, values, strict=True))
        if type(like) is dict or not isinstance(like, MutableMapping):
            return pairs if type(like) is dict else type(like)(pairs)  # type: ignore[call-arg]
        made = copy.copy(like)
        made.update(pairs)
        return made
    return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)


def copied(batch: Any) -> Any:
    """The batch in containers of its own, with copies of its tensors: what the loop changes in place is not changed here."""
    if isinstance(batch, Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if isinstance(batch, Mapping):
        return rebuilt(batch, [copied(value) for value in batch.values()])
    if isinstance(batch, tuple | list):
        return rebuilt(batch, [copied(value) for value in batch])
    return batch


Versions = tuple[tuple[Tensor, int], ...]


def versions_of(batch: Any) -> Versions:
    """The tensors of a batch, and how often each has been written to."""
    return tuple([(tensor, tensor._version) for tensor in tensors_of(batch)])


def is_made_of(batch: Any, given: Versions) -> bool:
    """Whether every tensor of a batch is one of the given ones, unchanged: the same object, or the same numbers on another
    device, in another shape or type.

    >>> x = torch.arange(6.0)
    >>> is_made_of({"x": x.view(2, 3).double()}, versions_of(x)), is_made_of([x + 1], versions_of(x))
    (True, False)
    """
    return all(any(_same_numbers(tensor, own) for own, n in given if own._version == n) for tensor in tensors_of(batch))


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    if one.numel() != other.numel() or one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    a, b = one.detach().reshape(-1), other.detach().reshape(-1).to(one.device, one.dtype)
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def placed_like(batch: Any, like: Any) -> Any:
    """The batch with each tensor on the device of its counterpart; None if they are not built alike."""
    theirs = iter(tensors_of(like))
    if structure_of(batch) != structure_of(like):
        return None
    return _moved(batch, theirs)


def structure_of(batch: Any) -> Any:
    """How a batch is built: containers, ranks and types, without sizes."""
    if isinstance(batch, Tensor):
        return batch.dim(), batch.dtype
    if isinstance(batch, Mapping):
        return {key: structure_of(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [structure_of(value) for value in batch] if tensors_of(batch) else type(batch)
    return type(batch)


def _moved(batch: Any, theirs: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(next(theirs).device)
    if isinstance(batch, Mapping):
        return rebuilt(batch, [_moved(value, theirs) for value in batch.values()])
    if isinstance(batch, tuple | list):
        return rebuilt(batch, [_moved(value, theirs) for value in batch])
    return batch
