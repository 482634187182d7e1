"""How long the records are: measured where they are collated, so that a longer or a shorter one is known when it comes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


def size_of(record: Any) -> int:
    """How many numbers a record has in its tensors, arrays, lists and strings.

    >>> size_of({"input_ids": [5, 6, 7], "label": 1}), size_of((torch.ones(2, 3), "four"))
    (3, 12)
    """
    if isinstance(record, torch.Tensor):
        return record.numel()
    if isinstance(record, Mapping):
        return sum(map(size_of, record.values()))
    if isinstance(record, str | bytes):
        return len(record)
    if isinstance(record, tuple | list):
        plain = not record or isinstance(record[0], int | float)
        return len(record) if plain else len(record) + sum(map(size_of, record))
    size = getattr(record, "size", None)
    return size if isinstance(size, int) else 0


class Measured(NamedTuple):
    """A batch, and the size of each of its records."""

    sizes: list[int]
    batch: Any


class MeasuringCollate:
    """Collates records, and measures them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, records: list[Any]) -> Measured:
        return Measured(list(map(size_of, records)), self._collate(records))


class ExtremeSizes:
    """The numbers of the shortest and the longest record so far.

    >>> extremes = ExtremeSizes()
    >>> [extremes.widened(torch.tensor(numbers), torch.tensor(sizes)) for numbers, sizes in (([3, 8], [5, 6]), ([4], [5]))]
    [True, False]
    >>> extremes.widened(torch.tensor([9]), torch.tensor([7])), extremes.records
    (True, (3, 9))
    """

    def __init__(self) -> None:
        self._shortest: tuple[int, int] | None = None
        self._longest: tuple[int, int] | None = None

    def widened(self, numbers: torch.Tensor, sizes: torch.Tensor | None) -> bool:
        """Whether a record is shorter or longer than all before."""
        if sizes is None or not len(sizes):
            return False
        least, most = int(sizes.argmin()), int(sizes.argmax())
        shorter = self._shortest is None or int(sizes[least]) < self._shortest[0]
        longer = self._longest is None or int(sizes[most]) > self._longest[0]
        if shorter:
            self._shortest = int(sizes[least]), int(numbers[least])
        if longer:
            self._longest = int(sizes[most]), int(numbers[most])
        return shorter or longer

    @property
    def records(self) -> tuple[int, ...]:
        """The number of the shortest and of the longest record; none if none was measured."""
        return tuple(found[1] for found in (self._shortest, self._longest) if found is not None)


def spread(numbers: torch.Tensor, sizes: torch.Tensor, count: int) -> list[int]:
    """So many of the numbers at most: the shortest record's, the longest's, and others in between, by their sizes.

    >>> spread(torch.tensor([7, 8, 9, 10, 11]), torch.tensor([5, 1, 4, 2, 3]), 3)
    [8, 11, 7]
    """
    in_order = numbers[sizes.argsort()].tolist()
    places = {k * (len(in_order) - 1) // max(count - 1, 1) for k in range(count)}
    return [in_order[place] for place in sorted(places)]
