"""Data sets that hold a record more than once: its contributions would add up to several times the threshold.

torch's combinations of data sets, and Hugging Face's, are resolved to the data that they take records from and the places
there. What a data set's own `__getitem__` returns cannot be seen.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from clipless.errors import InvalidArgument

RecordNumbers = NDArray[np.int64]
# From places in a data set, counted from 0, to the numbers of the records there.
Numbering = Callable[[RecordNumbers], RecordNumbers]

# Records of different data sets have numbers that lie so far apart.
APART = 2**40
# Python has one object for equal values of these types, so the same object need not be the same record.
VALUES = (bool, int, float, complex, str, bytes, type(None))


def refuse_repeats(dataset: Any) -> None:
    """Raise if the data set holds a record more than once, where that can be seen without reading the records."""
    if isinstance(dataset, Subset | ConcatDataset) or _is_arrow(dataset):
        numbers = Origins().of(dataset)(np.arange(len(dataset)))
        repeated = bool((np.diff(np.sort(numbers)) == 0).any())
    else:
        repeated = isinstance(dataset, list | tuple) and _has_repeats(dataset)
    if repeated:
        raise InvalidArgument(
            "the data set holds a record more than once: a Subset repeats an index, a ConcatDataset holds the same records "
            "twice, or a list holds the same object twice. The guarantee bounds what one record adds to a batch, and "
            "repeated ones would add several times as much. Let every record occur once, as in Subset(data, "
            "sorted(set(indices))); to use all records more often, raise epochs= or batch_size=."
        )


class Origins:
    """Numbers for the records of data sets: equal for the same record, wherever it occurs in a combination."""

    def __init__(self) -> None:
        self._kept: dict[object, tuple[int, Any]] = {}

    def of(self, dataset: Any) -> Numbering:
        """The numbering of a data set's records."""
        if isinstance(dataset, Subset):
            return _chosen(self.of(dataset.dataset), _from_zero(dataset))
        if isinstance(dataset, ConcatDataset):
            return _joined([self.of(part) for part in dataset.datasets], dataset.cumulative_sizes)
        if _is_arrow(dataset):
            return self._of_arrow(dataset)
        key: object = id(dataset)
        if type(dataset) is TensorDataset:  # others of the same tensors hold the same records
            key = tuple((each.data_ptr(), each.shape, each.stride(), each.dtype) for each in dataset.tensors)
        first = self._first(key, dataset)
        return lambda places: places + first

    def _of_arrow(self, dataset: Any) -> Numbering:
        """Rows of a Hugging Face data set are told by the memory that they lie in: concatenating the same data twice copies
        nothing. `select`, `shuffle` and `interleave_datasets` leave a list of row numbers."""
        columns = [column.chunks for column in dataset.data.columns]
        rows, sizes = [], []
        for chunk in zip(*columns, strict=False):
            first = self._first(tuple((_address(part), part.offset - chunk[0].offset) for part in chunk), chunk)
            rows.append(first + chunk[0].offset)
            sizes.append(len(chunk[0]))
        starts, ends = np.asarray(rows, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)
        begins = ends - np.asarray(sizes, dtype=np.int64)

        def numbered(places: RecordNumbers) -> RecordNumbers:
            which = np.searchsorted(ends, places, side="right")
            return starts[which] + places - begins[which]

        chosen = dataset._indices
        return numbered if chosen is None else _chosen(numbered, chosen.column(0).to_numpy().astype(np.int64))

    def _first(self, key: object, kept: object) -> int:
        """The number of the first record of some data, which are kept so that nothing else gets their address."""
        return self._kept.setdefault(key, (len(self._kept) * APART, kept))[0]


def _is_arrow(dataset: Any) -> bool:
    kind = type(dataset)
    return kind.__name__ == "Dataset" and kind.__module__ == "datasets.arrow_dataset"


def _address(part: Any) -> object:
    """Where the numbers of a part of a column lie; the part itself if it has none."""
    return next((buffer.address for buffer in reversed(part.buffers()) if buffer is not None), id(part))


def _from_zero(subset: Subset[Any]) -> RecordNumbers:
    """A subset's indices, those from the end too, counted from 0."""
    given: Any = subset.indices
    chosen = np.asarray(given.cpu() if isinstance(given, Tensor) else given, dtype=np.int64)
    return np.where(chosen < 0, chosen + len(subset.dataset), chosen)  # type: ignore[arg-type]


def _chosen(inner: Numbering, chosen: RecordNumbers) -> Numbering:
    return lambda places: inner(chosen[places])


def _joined(parts: Sequence[Numbering], ends: Sequence[int]) -> Numbering:
    """The numbering of data sets one after the other, which end at these places."""

    def numbered(places: RecordNumbers) -> RecordNumbers:
        which, found, done = np.searchsorted(ends, places, side="right"), np.empty_like(places), 0
        order = np.argsort(which, kind="stable")
        counts = np.bincount(which, minlength=len(parts)).tolist()
        for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
            here = order[done : done + count]
            found[here] = part(places[here] - (ends[number - 1] if number else 0))
            done += count
        return found

    return numbered


def _has_repeats(records: Sequence[Any]) -> bool:
    """Whether an object occurs twice, other than values that Python shares."""
    if len(set(map(id, records))) == len(records):
        return False
    seen: set[int] = set()
    for record in records:
        if id(record) in seen and not _is_value(record):
            return True
        seen.add(id(record))
    return False


def _is_value(record: Any) -> bool:
    return isinstance(record, VALUES) or (isinstance(record, tuple) and all(map(_is_value, record)))
