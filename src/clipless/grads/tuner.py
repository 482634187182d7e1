"""The tuner: which of the exact ways to each layer's share is taken.

All ways give the same sum up to rounding; which is fastest depends on shapes, type and machine. By default a cost model
decides, a pure function of the shapes: the same run takes the same ways on every machine and after every resume. A
timing tuner runs each way once on the first batch of its kind and remembers, as `cudnn.benchmark` does.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from clipless.errors import InvalidArgument, InvalidType, named
from clipless.grads.pieces import Cost, Piece
from clipless.grads.pieces.scratch import KEPT

# What private training may hold over plain training on its way to the factors: at most a third of it for ways that are
# faster than the thriftiest, the rest for what those keep.
MEMORY_CAP = 384 * 2**20
FASTER = 1 / 3
# What the allocator loses between buffers, measured.
FRAGMENTS = 1.1
# What is clipped at once is written out for so many bytes of records or groups at a time: they stay in the cache.
CHUNK_BYTES = 24 * 2**20

# The cost model: operations and bytes in a second and thread, and the seconds of a call. Larger buffers than `FRESH` are
# not used again by the C library but handed out by the operating system page by page, at `FAULT` seconds a byte.
FLOPS = 60e9
BANDWIDTH = 9e9
CALL = 4e-6
FRESH = 32 * 2**20
FAULT = 1e-9
REPEATS = 3

# Seconds of every way by what was timed: timing tuners of one process share what they learn.
_TIMED: dict[str, dict[str, float]] = {}


def modelled_seconds(cost: Cost, threads: int) -> float:
    """What a way costs by the model.

    >>> modelled_seconds(Cost(flops=60e9, moved=9e9, calls=0, held=0), threads=1)
    2.0
    """
    faults = cost.held * FAULT if cost.held > FRESH else 0.0
    return (cost.flops / FLOPS + cost.moved / BANDWIDTH) / threads + cost.calls * CALL + faults


class Choice(NamedTuple):
    """How a piece is taken: the way, empty if there was none to choose; the bytes that it then holds for all records; and
    the records that are taken together."""

    way: str
    held: float
    chunks: list[slice]


class Tuner:
    """Chooses a way for every piece, so that private training takes at most `memory_cap` bytes more than plain training.

    The thriftiest ways keep what the records' norms need until all are known, such as each layer's output gradient. If
    that alone is more than the cap, they are taken all the same; 0 asks for them. Nothing is said when it happens, as it
    depends on the size of the batch, which is not public: smaller micro-batches need less.

    `timed=True` times the ways instead of modelling them: faster on unusual machines or shapes, but a run is then
    repeatable to the last bit only where it takes the same ways (`save` and `load` carry them over).
    """

    def __init__(self, timed: bool = False, memory_cap: int | None = None) -> None:
        memory_cap = MEMORY_CAP if memory_cap is None else memory_cap
        if isinstance(memory_cap, bool) or not isinstance(memory_cap, int):
            raise InvalidType(f"memory_cap must be a whole number of bytes, got {memory_cap!r}.")
        if memory_cap < 0:
            raise InvalidArgument(f"memory_cap must not be negative, got {memory_cap}.")
        self.timed = timed
        self.memory_cap = memory_cap
        self.begin()

    def __repr__(self) -> str:
        return f"Tuner(timed={self.timed}, memory_cap={self.memory_cap})"

    @property
    def chunk_bytes(self) -> int:
        """The most that is written out at a time of what can be clipped at once."""
        return min(CHUNK_BYTES, int(FASTER * self.memory_cap))

    def begin(self) -> None:
        """New records come: nothing is held for them yet. `expected` is what the thriftiest ways will hold at least."""
        self.expected = self._faster = self._least = 0.0

    def choose(self, piece: Piece, parameter: Tensor) -> Choice:
        """The fastest way that fits under the cap beside what is held already, for all records together."""
        everyone, ways = slice(0, len(piece)), piece.ways()
        if not ways:
            return Choice("", _written_bytes(piece, parameter), [everyone])
        least = min(cost.held for cost in ways.values())
        self._least += least  # what the thriftiest way holds of a piece is held by any
        room = self.memory_cap - self._needed(max(self._least, self.expected))
        left = min(FASTER * self.memory_cap, room) - self._faster
        fitting = {way: cost for way, cost in ways.items() if cost.held - least <= max(left, 0)}
        way = self._fastest(piece, fitting, parameter)
        self._faster += ways[way].held - least
        return Choice(way, ways[way].held, [everyone])

    def in_chunks(self, piece: Piece, parameter: Tensor) -> Choice:
        """As `choose`, for a piece whose factors can be had at once: its buffers are never there for all records."""
        records, ways = len(piece), piece.ways()
        if not ways or not records:
            return Choice("", _written_bytes(piece, parameter), [slice(0, records)])
        least, small = _in_chunks(records, tuple(ways.items()), FASTER * self.memory_cap, CHUNK_BYTES)
        way = self._fastest(piece, small, parameter)
        size = records if way == least else max(1, int(self.chunk_bytes // (ways[way].held / records)))
        if torch.get_num_threads() < size < records:
            size -= size % torch.get_num_threads()  # a thread that had no record to compute would wait
        chunks = [slice(first, min(first + size, records)) for first in range(0, records, size)]
        return Choice(way, ways[way].held, chunks)

    def _needed(self, least: float) -> float:
        """What is taken in any way, where the thriftiest ways hold so much."""
        return FRAGMENTS * (min(KEPT, self.memory_cap / 3) + least)

    def save(self, path: str | Path) -> None:
        """Write what timing has taught this process, for `load` in another."""
        part = Path(f"{path}.part")
        part.write_text(json.dumps(_TIMED, indent=1, sort_keys=True), encoding="utf-8")
        os.replace(part, path)

    def load(self, path: str | Path) -> None:
        """Take over what `save` wrote; what is in it is not timed again."""
        try:
            seconds = {
                str(key): {str(way): float(value) for way, value in ways.items()}
                for key, ways in json.loads(Path(path).read_text(encoding="utf-8")).items()
            }
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"{path} is not a file of timings ({error}): delete it and time anew.") from error
        _TIMED.update(seconds)

    def _fastest(self, piece: Piece, ways: Mapping[str, Cost], parameter: Tensor) -> str:
        if len(ways) == 1:
            return next(iter(ways))
        if not self.timed:
            return _modelled_fastest(tuple(ways.items()), torch.get_num_threads())
        seconds = _TIMED.setdefault(_key(piece, parameter), {})
        for way in ways:
            if way not in seconds:
                seconds[way] = _measured(piece, way, parameter)
        return min(ways, key=lambda way: seconds[way])


@lru_cache(maxsize=4096)
def _in_chunks(
    records: int, ways: tuple[tuple[str, Cost], ...], room: float, chunk: int
) -> tuple[str, Mapping[str, Cost]]:
    """The thriftiest way, and what each costs in chunks, of those that have room for what they hold of one record."""
    least, thrifty = min(ways, key=lambda way: way[1].held)
    small = {
        way: replace(cost, held=min(cost.held, chunk))
        for way, cost in ways
        if way == least or (cost.held - thrifty.held) / records <= room
    }
    return least, small


@lru_cache(maxsize=4096)
def _modelled_fastest(ways: tuple[tuple[str, Cost], ...], threads: int) -> str:
    fastest, _ = min(ways, key=lambda way: modelled_seconds(way[1], threads))
    return fastest


def _key(piece: Piece, parameter: Tensor) -> str:
    """What the seconds depend on; numbers of records within a factor of about 1.4 count as the same."""
    records = 2 ** round(math.log2(max(len(piece), 1)))
    sizes = "x".join(map(str, (records, *piece.signature)))
    threads = torch.get_num_threads()
    return f"{type(piece).__name__} {sizes} {parameter.dtype} {parameter.device.type} {threads} threads"


def _measured(piece: Piece, way: str, parameter: Tensor) -> float:
    total = torch.empty(
        parameter.shape, dtype=torch.promote_types(parameter.dtype, torch.float32), device=parameter.device
    )
    factors = torch.ones(len(piece), dtype=total.dtype, device=parameter.device)
    best = math.inf
    for _ in range(REPEATS):
        _wait(parameter)
        begin = time.perf_counter()
        formed = piece.rows(slice(None)).form(way)
        formed.sq_norms  # noqa: B018
        formed.add_to(total, factors, beta=0)
        _wait(parameter)
        best = min(best, time.perf_counter() - begin)
    return best


def _written_bytes(piece: Piece, parameter: Tensor) -> float:
    return float(len(piece) * parameter.numel() * parameter.element_size())


def _wait(parameter: Tensor) -> None:
    if parameter.device.type != "cpu":
        torch.accelerator.synchronize()


TUNERS = {"model": Tuner, "time": lambda: Tuner(timed=True)}


def as_tuner(tuner: "str | Tuner") -> Tuner:
    """A tuner by its name, or as it is."""
    return tuner if isinstance(tuner, Tuner) else named("tuner", tuner, TUNERS)()
