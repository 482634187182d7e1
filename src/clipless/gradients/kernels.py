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

# The memory that private training may take beyond plain training: at most a third (`FASTER`) for methods that need more
# than the thriftiest and are faster, the rest for what the thriftiest need.
MEMORY_CAP = 384 * 2**20
FASTER = 1 / 3
# Room for temporary buffers.
TEMPORARY = 64 * 2**20
# Overhead of the allocator between buffers, measured.
FRAGMENTS = 1.1
# The last form of a group is written out in chunks of so many bytes, which stay in the cache.
CHUNK_BYTES = 24 * 2**20

# The cost model: operations and bytes per second and thread, and seconds per call. The C library does not reuse
# buffers larger than `FRESH`; the operating system maps them page by page, at `FAULT` seconds a byte.
FLOPS = 60e9
BANDWIDTH = 9e9
CALL = 4e-6
FRESH = 32 * 2**20
FAULT = 1e-9


def modelled_seconds(cost: Cost, threads: int) -> float:
    """The time that a method takes by the cost model.

    >>> modelled_seconds(Cost(flops=60e9, moved=9e9, calls=0, held=0), threads=1)
    2.0
    """
    faults = cost.held * FAULT if cost.held > FRESH else 0.0
    return (cost.flops / FLOPS + cost.moved / BANDWIDTH) / threads + cost.calls * CALL + faults


class Choice(NamedTuple):
    """How a form is computed: by which method, how many bytes it then holds for all records, and in which chunks of
    records."""

    method: str
    held: float
    chunks: list[slice]


class Kernels:
    """Chooses a method for every form, so that private training takes at most `memory_cap` bytes more than plain training.

    The methods that need least memory hold, until all norms are known, what the norms need, such as each layer's output
    gradient. If that alone exceeds the cap, they are used anyway; a cap of 0 always selects them. There is no warning, since
    whether it happens depends on the size of the batch, which is not public. Smaller micro-batches need less.
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
        """The budget of a new micro-batch."""
        return MemoryBudget(self.memory_cap)


def chunk_bytes(memory_cap: int) -> int:
    """The largest number of bytes to write out at a time for the last form of a group."""
    return min(CHUNK_BYTES, int(FASTER * memory_cap))


class MemoryBudget:
    """Chooses methods for the forms of one micro-batch, and counts what they hold."""

    def __init__(self, memory_cap: int) -> None:
        self._cap = memory_cap
        self._faster = self._least = 0.0

    def choose(self, methods: Mapping[str, Cost], records: int, last: bool, expected: float) -> Choice:
        """The fastest of a form's methods that fits under the cap, given what is held already. The thriftiest methods will
        hold at least `expected` bytes in total. The `last` form of a group can be clipped in chunks, so it need not be held
        for all records."""
        return self._in_chunks(methods, records) if last else self._at_once(methods, records, expected)

    def _at_once(self, methods: Mapping[str, Cost], records: int, expected: float) -> Choice:
        """For all records together."""
        least = min([cost.held for cost in methods.values()])
        self._least += least  # every method holds at least what the thriftiest holds
        needed = FRAGMENTS * (min(TEMPORARY, self._cap / 3) + max(self._least, expected))
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
            size -= size % threads  # or a thread would be idle
        chunks = [slice(first, min(first + size, records)) for first in range(0, records, size)]
        return Choice(method, methods[method].held, chunks)


@lru_cache(maxsize=4096)
def _small_enough(
    records: int, methods: tuple[tuple[str, Cost], ...], room: float, chunk: int
) -> tuple[str, tuple[tuple[str, Cost], ...]]:
    """The thriftiest method, and the costs in chunks of all methods for which one record fits into `room`."""
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
