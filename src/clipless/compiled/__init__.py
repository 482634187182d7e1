"""C code that does in one pass what torch and numpy do in many. It is built with the package where there is a C compiler
(see hatch_build.py), and nothing needs it: whoever uses it has the same in numpy or torch, checks the two against each
other at the first use, and does without it otherwise.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

LIBRARY = Path(__file__).with_name("_compiled.so")
SOURCES = LIBRARY.parent

POINTER, COUNT = ctypes.c_void_p, ctypes.c_int64


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
