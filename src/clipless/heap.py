"""The heap of the C library: what was freed and is still held."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache


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
