"""Threads that draw side by side. They are kept between calls, and a forked child makes its own."""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Job = TypeVar("Job")

# From so many jobs on it pays to send OpenMP's threads away, which takes a tenth of a millisecond.
MANY_JOBS = 4
_OPENMP_SOFT_PAUSE = 1

_POOLS: list[ThreadPoolExecutor] = []
# OpenMP's own call that ends its threads until they are needed again, where the library that torch uses has it.
_PAUSES = [getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)] if os.name == "posix" else [None]


def _in_child() -> None:
    """A child has the parent's pools, and none of their threads: whoever waits for one would wait for ever."""
    _POOLS.clear()
    _PAUSES[:] = [None]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def share(jobs: Sequence[Job], work: Callable[[Iterator[Job]], None]) -> None:
    """Call `work` in as many threads as torch uses, this one among them, each with an iterator over its share of the jobs.

    Who is free takes the next job, so results must not depend on who does which. What a thread raises is raised here.

    >>> done = []
    >>> share([1, 2, 3], lambda mine: done.extend(mine))
    >>> sorted(done)
    [1, 2, 3]
    """
    queue = deque(jobs)
    helpers = min(torch.get_num_threads(), len(queue)) - 1
    if helpers > 0 and not _POOLS:
        _POOLS.append(ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="clipless-noise"))
    if helpers > 0 and len(queue) >= MANY_JOBS and _PAUSES[0] is not None:
        # After each of torch's operations they look out for the next for some milliseconds, on the cores that are wanted
        # here. Should the library refuse, nothing but time is lost.
        _PAUSES[0](_OPENMP_SOFT_PAUSE)
    helping = [_POOLS[0].submit(work, _taken(queue)) for _ in range(helpers)]
    try:
        work(_taken(queue))
    finally:
        queue.clear()
        for helper in helping:
            helper.result()


def _taken(queue: deque[Job]) -> Iterator[Job]:
    while True:
        try:
            job = queue.popleft()
        except IndexError:
            return
        yield job
