"""The heap of the C library: what was freed and is still held.

A step frees at its end most of what it held. glibc gives the free end of its heap back to the operating system as soon as
that is larger than a threshold, which follows from what the process did before, and gets it back page by page in the next
step: 50,000 pages, a tenth of the time, in a step of an encoder of 22 million parameters.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

# glibc's numbers of two settings: the size from which on it gives back the free end of its heap, and that from which on it
# maps a block by itself and gives it back when it is freed. Both become the largest int.
TRIM_THRESHOLD, MMAP_THRESHOLD, MOST = -1, -3, 2**31 - 1
VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
)


@cache
def keep_freed_memory() -> bool:
    """From now on this process keeps the memory that a step frees for the next one, instead of returning it.

    Whoever has set one of glibc's own variables has chosen, also if it is empty: nothing happens then, nor with other C
    libraries. Returns whether anything was set.
    """
    if any(name in os.environ for name in VARIABLES):
        return False
    try:
        mallopt: Callable[[int, int], int] = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(MMAP_THRESHOLD, MOST) and mallopt(TRIM_THRESHOLD, MOST))


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Freed memory goes back to the operating system before the block and after it.

    Passes on other numbers of rows leave holes of sizes that no later pass fills. glibc alone holds on to them; with other
    libraries nothing happens.
    """
    trim = _trim()
    trim(0)
    try:
        yield
    finally:
        trim(0)


@cache
def _trim() -> Callable[[int], int]:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return int
    return found
