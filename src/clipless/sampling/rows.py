"""Where the records lie in a collated batch, and batches of some of its records.

Checks run a training step's function again on other records, and `private.step` splits batches: both need the same batch
with some of its rows. A batch consists of tensors and arrays, in tuples, lists, mappings and dataclasses, however nested.
Tensors are indexed along their batch dimension, and a list that has an entry for each record (boxes, names) is indexed too.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

# Built like the batch: for a tensor the dimension along which its records lie, for a list with an entry for each record
# EACH, for any other container a list of what its parts have, and None for what has no rows.
BatchDims = Any
EACH = "each"

# What is the same for all records, if it is not in a list with an entry for each.
_CONSTANTS = (str, bytes, int, float, complex, bool, type(None), np.generic, torch.device, torch.dtype)


class _Unlike(Exception):
    """Two batches are not built alike."""


def parts_of(value: Any) -> list[Any] | None:
    """The parts of a container, in a fixed order; None for anything else, such as a packed sequence."""
    if isinstance(value, PackedSequence):
        return None
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def tensors_of(batch: Any) -> list[Tensor | np.ndarray[Any, Any]]:
    """All tensors and arrays of a batch, in a fixed order."""
    if isinstance(batch, Tensor | np.ndarray):
        return [batch]
    return [tensor for part in parts_of(batch) or () for tensor in tensors_of(part)]


def shapes_in(batch: Any) -> list[tuple[int, ...]]:
    """The shapes of these."""
    return [tuple(tensor.shape) for tensor in tensors_of(batch)]


def cut(batch: Any, shapes: Sequence[tuple[int, ...]], last: bool) -> Any:
    """A batch with its tensors cut down to these shapes: to the first numbers along each dimension, or to the last.

    >>> cut({"x": torch.arange(4)}, [(3,)], last=True)
    {'x': tensor([1, 2, 3])}
    """
    waiting = iter(shapes)

    def change(tensor: Any) -> Any:
        sizes = zip(tensor.shape, next(waiting), strict=True)
        return tensor[tuple([slice(whole - size, None) if last else slice(size) for whole, size in sizes])]

    return _mapped(batch, change)


def _mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with every tensor and array changed, in a fixed order."""
    if isinstance(batch, Tensor | np.ndarray):
        return change(batch)
    parts = parts_of(batch)
    return batch if parts is None else rebuilt(batch, [_mapped(part, change) for part in parts])


def alike(one: Any, other: Any) -> bool:
    """Whether two batches are the same: containers, types and every number.

    >>> alike({"x": torch.ones(2), "name": ["ada"]}, {"x": torch.ones(2), "name": ["ada"]}), alike([1], [1, 2])
    (True, False)
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    ours, theirs = parts_of(one), parts_of(other)
    if isinstance(one, Mapping) and list(one) != list(other):
        return False
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if ours is None or theirs is None:
        return isinstance(one, _CONSTANTS) and one == other
    return len(ours) == len(theirs) and all(map(alike, ours, theirs))


def learned_dims(one: Any, two: Any) -> BatchDims:
    """Where the records lie, from the same sample collated once and twice; None if that cannot be told.

    >>> learned_dims((torch.ones(5, 1, 3), ["ada"]), (torch.ones(5, 2, 3), ["ada", "ada"]))
    [1, 'each']
    >>> learned_dims([torch.ones(7, 3), torch.ones(4)], [torch.ones(14, 3), torch.ones(4)]) is None
    True
    """
    try:
        return _learned(one, two)
    except _Unlike:
        return None


def _learned(one: Any, two: Any) -> BatchDims:
    if isinstance(one, Tensor | np.ndarray) and isinstance(two, Tensor | np.ndarray):
        changed = [dim for dim, sizes in enumerate(zip(one.shape, two.shape, strict=False)) if sizes[0] != sizes[1]]
        if (
            one.ndim != two.ndim
            or len(changed) > 1
            or any((one.shape[dim], two.shape[dim]) != (1, 2) for dim in changed)
        ):
            raise _Unlike
        return changed[0] if changed else None
    if _grows(one) and _grows(two) and (len(one), len(two)) == (1, 2):
        return EACH
    ours, theirs = parts_of(one), parts_of(two)
    if (ours is None) != (theirs is None) or len(ours or ()) != len(theirs or ()):
        raise _Unlike
    return None if ours is None else [_learned(a, b) for a, b in zip(ours, theirs or (), strict=True)]


def _grows(value: Any) -> bool:
    """Whether this may be a list with an entry for each record."""
    return isinstance(value, tuple | list) and not hasattr(value, "_fields")


def likely_dims(batch: Any, records: int) -> BatchDims:
    """Where the records probably lie: along the first dimension of their number, or in a list of so many entries."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch.shape.index(records) if records in batch.shape else None
    parts = parts_of(batch)
    if parts is None:
        return None
    if _grows(batch) and len(parts) == records and not all(_has_rows(part, records) for part in parts):
        return EACH
    return [likely_dims(part, records) for part in parts]


def _has_rows(value: Any, records: int) -> bool:
    return any(records in tensor.shape for tensor in tensors_of(value))


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
        """Whether the batch is what `dims` says, and some part has rows at all."""
        return self._fits(self.batch, self.dims) and any(dim is not None for dim in _flat(self.dims))

    def _fits(self, value: Any, dims: BatchDims) -> bool:
        if dims == EACH:
            return _grows(value) and len(value) == self.records
        if isinstance(value, Tensor | np.ndarray):
            return dims is None or (isinstance(dims, int) and value.shape[dims : dims + 1] == (self.records,))
        parts = parts_of(value)
        if parts is None:
            return dims is None and isinstance(value, _CONSTANTS)
        built = isinstance(dims, list) and len(dims) == len(parts)
        return built and all(self._fits(part, dim) for part, dim in zip(parts, dims, strict=True))

    def chosen(self, rows: Tensor) -> Any:
        """The batch with these of its records, in this order."""
        return _chosen(self.batch, self.dims, rows)


def _flat(dims: BatchDims) -> Iterator[int | str | None]:
    if isinstance(dims, list):
        for dim in dims:
            yield from _flat(dim)
    else:
        yield dims


def _chosen(value: Any, dims: BatchDims, rows: Tensor) -> Any:
    if dims is None:
        return value
    if dims == EACH:
        return rebuilt(value, [value[row] for row in rows.tolist()])
    if isinstance(value, Tensor):
        return value.index_select(dims, rows.to(value.device))
    if isinstance(value, np.ndarray):
        return value.take(rows.numpy(), axis=dims)
    return rebuilt(value, [_chosen(part, dim, rows) for part, dim in zip(parts_of(value) or (), dims, strict=True)])


def rows_of(batch: Any, records: int, known: BatchDims) -> BatchRows | None:
    """A batch with its rows: where the loader knows them to be if that fits, else where they probably are. None if they are
    nowhere to be seen."""
    if known is not None:
        rows = BatchRows(batch, records, known)
        if rows.usable:
            return rows
    certain = all(tuple(tensor.shape).count(records) <= 1 for tensor in tensors_of(batch)) and not _as_long(
        batch, records
    )
    rows = BatchRows(batch, records, likely_dims(batch, records), certain)
    return rows if rows.usable else None


def _as_long(value: Any, records: int) -> bool:
    """Whether a list of tensors has as many entries as there are records."""
    here = _grows(value) and len(value) == records and bool(tensors_of(value))
    return here or any(_as_long(part, records) for part in parts_of(value) or ())


def rebuilt(like: Any, values: Sequence[Any]) -> Any:
    """A container of the same type with other parts."""
    if isinstance(like, Mapping):
        pairs = dict(zip(like, values, strict=True))
        if type(like) is dict or not isinstance(like, MutableMapping):
            return pairs if type(like) is dict else type(like)(pairs)  # type: ignore[call-arg]
        mapping = copy.copy(like)
        mapping.update(pairs)
        return mapping
    if dataclasses.is_dataclass(like):
        twin = copy.copy(like)
        for field, value in zip(dataclasses.fields(like), values, strict=True):
            object.__setattr__(twin, field.name, value)
        return twin
    if type(like) in (tuple, list):
        return type(like)(values)
    if isinstance(like, list):
        same = copy.copy(like)
        same[:] = values
        return same
    try:
        return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)
    except TypeError:  # made in a way of its own
        return tuple(values)


def copied(batch: Any) -> Any:
    """The batch in containers of its own, with copies of its tensors: what the loop changes in place is not changed here."""
    if isinstance(batch, Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if isinstance(batch, np.ndarray):
        return batch.copy()
    parts = parts_of(batch)
    if parts is not None:
        return rebuilt(batch, [copied(part) for part in parts])
    if isinstance(batch, _CONSTANTS):
        return batch
    try:
        return copy.deepcopy(batch)
    except Exception:
        return batch


class Given:
    """A batch as a function is given it: its containers are copied, so that what is taken out of them is still in the
    original, and its tensors are not."""

    def __init__(self, batch: Any) -> None:
        self.batch = _reopened(batch)
        self.tensors = tensors_of(batch)
        self._versions = list(map(_version, self.tensors))

    def unchanged(self) -> bool:
        """Whether no tensor was changed in place. Arrays do not tell."""
        return None not in self._versions and self._versions == list(map(_version, self.tensors))


def _version(tensor: Any) -> int | None:
    return tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else None


def _reopened(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch
    parts = parts_of(batch)
    return batch if parts is None else rebuilt(batch, list(map(_reopened, parts)))


Versions = tuple[tuple[Tensor, int | None], ...]


def versions_of(batch: Any) -> Versions:
    """The tensors of a batch, and how often each has been written to."""
    return tuple([(tensor, _version(tensor)) for tensor in tensors_of(batch) if isinstance(tensor, Tensor)])


def is_made_of(batch: Any, given: Versions) -> bool:
    """Whether every tensor of a batch is one of the given ones, unchanged: the same object, or the same numbers on another
    device, in another shape or type.

    >>> x = torch.arange(6.0)
    >>> is_made_of({"x": x.view(2, 3).double()}, versions_of(x)), is_made_of([x + 1], versions_of(x))
    (True, False)
    """
    tensors = [tensor for tensor in tensors_of(batch) if isinstance(tensor, Tensor)]
    return all(any(_same_numbers(tensor, own) for own, n in given if _version(own) == n) for tensor in tensors)


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    if one.numel() != other.numel() or one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    a, b = one.detach().reshape(-1), other.detach().reshape(-1).to(one.device, one.dtype)
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def placed_like(batch: Any, like: Any) -> Any:
    """The batch in the same containers, with each tensor on the device of its counterpart; None if they are not built
    alike. Lists with an entry for each record may have other numbers of entries."""
    try:
        return _placed(batch, like)
    except _Unlike:
        return None


def _placed(batch: Any, like: Any) -> Any:
    if isinstance(batch, Tensor) and isinstance(like, Tensor):
        if (batch.dim(), batch.dtype) != (like.dim(), like.dtype):
            raise _Unlike
        return batch.to(like.device)
    ours, theirs = parts_of(batch), parts_of(like)
    if ours is None or theirs is None:
        if (ours is None) != (theirs is None) or type(batch) is not type(like):
            raise _Unlike
        return batch
    if isinstance(batch, Mapping) and (not isinstance(like, Mapping) or list(batch) != list(like)):
        raise _Unlike
    if len(ours) == len(theirs):
        return rebuilt(like, [_placed(a, b) for a, b in zip(ours, theirs, strict=True)])
    if not theirs or not _grows(like) or not _grows(batch):
        raise _Unlike
    return rebuilt(like, [_placed(part, theirs[0]) for part in ours])
