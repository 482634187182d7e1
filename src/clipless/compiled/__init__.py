"""C code that does in one pass what torch and numpy do in many. It is built with the package where there is a C compiler
(see hatch_build.py), and nothing needs it: whoever uses it has the same in numpy or torch, checks the two against each
other at the first use, and does without it otherwise.

It runs in OpenMP's threads, which it shares with torch: that torch is imported first makes its library theirs.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("_compiled.so")
SOURCES = LIBRARY.parent

POINTER, COUNT = ctypes.c_void_p, ctypes.c_int64
# Work that takes longer than it takes to wake a thread, in bytes that are read or written.
WORTH_A_THREAD = 2**17

_FORKED: list[bool] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _FORKED.append(True))


@functools.cache
def function(name: str, *arguments: type, library: Path = LIBRARY) -> Callable[..., None] | None:
    """A function of the library that returns nothing; None if there is no library or no such function."""
    try:
        found = ctypes.CDLL(str(library))[name]
    except (OSError, AttributeError):
        return None
    found.argtypes = arguments
    found.restype = None
    return found


def threads(work: int) -> int:
    """In how many threads so many bytes are best gone through: at most as many as torch uses, and one in a forked child,
    where OpenMP's are gone and waited for in vain.

    >>> threads(100)
    1
    """
    return 1 if _FORKED else max(1, min(torch.get_num_threads(), work // WORTH_A_THREAD))
