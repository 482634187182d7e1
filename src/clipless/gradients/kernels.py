"""Which of the exact methods computes each parameter's norms and sum.

All methods give the same sum up to rounding; which is fastest depends on shapes, type and machine. A cost model
decides, a pure function of the shapes: the same run takes the same methods on every machine and after every resume.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from clipless.errors import InvalidArgument, InvalidType
from clipless.gradients.forms import Cost
from clipless.gradients.forms.scratch import KEPT

# What private training may hold over plain training on its way to the factors: at most a third of it for methods that are
# faster than the thriftiest, the rest for what those keep.
MEMORY_CAP = 384 * 2**20
FASTER = 1 / 3
# What the allocator loses between buffers, measured.
FRAGMENTS = 1.1
# What can be clipped at once is written out for so many bytes of records or groups at a time: they stay in the cache.
CHUNK_BYTES = 24 * 2**20

# The cost model: operations and bytes per second and thread, and seconds per call. The C library does not reuse
# buffers larger than `FRESH`; the operating system hands them out page by page, at `FAULT` seconds a byte.
FLOPS = 60e9
BANDWIDTH = 9e9
CALL = 4e-6
FRESH = 32 * 2**20
FAULT = 1e-9


def modelled_seconds(cost: Cost, threads: int) -> float:
    """What a method costs by the model.

    >>> modelled_seconds(Cost(flops=60e9, moved=9e9, calls=0, held=0), threads=1)
    2.0
    """
    faults = cost.held * FAULT if cost.held > FRESH else 0.0
    return (cost.flops / FLOPS + cost.moved / BANDWIDTH) / threads + cost.calls * CALL + faults


class Choice(NamedTuple):
    """How a form is taken: by which method, the bytes that it then holds for all records, and which records are taken
    together."""

    method: str
    held: float
    chunks: list[slice]


class Kernels:
    """Chooses a method for every form, so that private training takes at most `memory_cap` bytes more than plain training.

    The thriftiest methods keep what the records' norms need until all are known, such as each layer's output gradient.
    If that alone exceeds the cap, they are taken all the same; 0 asks for them. It happens without a word, since it
    depends on the size of the batch, which is not public: smaller micro-batches need less.
    """

    def __init__(self, memory_cap: int | None = None) -> None:
        memory_cap = MEMORY_CAP if memory_cap is None else memory_cap
        if isinstance(memory_cap, bool) or not isinstance(memory_cap, int):
            raise InvalidType(f"memory_cap must be a whole number of bytes, got {memory_cap!r}.")
        if memory_cap < 0:
            raise InvalidArgument(f"memory_cap must not be negative, got {memory_cap}.")
        self.memory_cap = memory_cap

    def __repr__(self) -> str:
        return f"Kernels(memory_cap={self.memory_cap})"

    def budget(self) -> "MemoryBudget":
        """That of a micro-batch for which nothing is held yet."""
        return MemoryBudget(self.memory_cap)


def chunk_bytes(memory_cap: int) -> int:
    """The most that is written out at a time of what can be clipped at once."""
    return min(CHUNK_BYTES, int(FASTER * memory_cap))


class MemoryBudget:
    """Chooses methods for the forms of one micro-batch, and counts what they hold."""

    def __init__(self, memory_cap: int) -> None:
        self._cap = memory_cap
        self._faster = self._least = 0.0

    def choose(self, methods: Mapping[str, Cost], records: int, last: bool, expected: float) -> Choice:
        """The fastest of a form's methods that fits under the cap beside what is held already. The thriftiest methods will
        hold at least `expected` bytes in all. The `last` form of a group can be clipped at once, so its buffers need not be
        there for all records."""
        return self._in_chunks(methods, records) if last else self._at_once(methods, records, expected)

    def _at_once(self, methods: Mapping[str, Cost], records: int, expected: float) -> Choice:
        """For all records together."""
        least = min([cost.held for cost in methods.values()])
        self._least += least  # any method holds what the thriftiest holds
        needed = FRAGMENTS * (min(KEPT, self._cap / 3) + max(self._least, expected))
        left = min(FASTER * self._cap, self._cap - needed) - self._faster
        fitting = tuple([(method, cost) for method, cost in methods.items() if cost.held - least <= max(left, 0)])
        method = _fastest(fitting, torch.get_num_threads())
        self._faster += methods[method].held - least
        return Choice(method, methods[method].held, [slice(0, records)])

    def _in_chunks(self, methods: Mapping[str, Cost], records: int) -> Choice:
        """For some records at a time, if the method writes out more than the thriftiest."""
        threads = torch.get_num_threads()
        thriftiest, small = _small_enough(records, tuple(methods.items()), FASTER * self._cap, CHUNK_BYTES)
        method = _fastest(small, threads)
        size = records
        if method != thriftiest:
            size = max(1, int(chunk_bytes(self._cap) // (methods[method].held / records)))
        if threads < size < records:
            size -= size % threads  # a thread without a record would wait
        chunks = [slice(first, min(first + size, records)) for first in range(0, records, size)]
        return Choice(method, methods[method].held, chunks)


@lru_cache(maxsize=4096)
def _small_enough(
    records: int, methods: tuple[tuple[str, Cost], ...], room: float, chunk: int
) -> tuple[str, tuple[tuple[str, Cost], ...]]:
    """The thriftiest method, and what each costs in chunks, of those that have room for what they hold of one record."""
    least, thrifty = min(methods, key=lambda method: method[1].held)
    small = [
        (method, replace(cost, held=min(cost.held, chunk)))
        for method, cost in methods
        if method == least or (cost.held - thrifty.held) / records <= room
    ]
    return least, tuple(small)


@lru_cache(maxsize=4096)
def _fastest(methods: tuple[tuple[str, Cost], ...], threads: int) -> str:
    """The fastest method by the model."""
    fastest, _ = min(methods, key=lambda method: modelled_seconds(method[1], threads))
    return fastest
