"""Threads that draw side by side. They are kept between calls, and a forked child makes its own."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Job = TypeVar("Job")

_POOLS: list[ThreadPoolExecutor] = []
# A child has the parent's pool, and none of its threads: work given to it would wait for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOLS.clear)


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
