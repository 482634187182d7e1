"""The compiled library: its functions, in how many threads they run, and the check before their first use.

The threads are OpenMP's, shared with torch: importing torch first makes the two use the same OpenMP library.
"""

import ctypes
import functools
import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

LIBRARY = Path(__file__).with_name("_compiled.so")
SOURCES = LIBRARY.parent
STAMP = "clipless_sources"  # the digest of the sources that the library was made of

POINTER, COUNT = ctypes.c_void_p, ctypes.c_int64
# Work that takes longer than it takes to wake a thread, in bytes that are read or written.
WORTH_A_THREAD = 2**17

Native = TypeVar("Native")

_FORKED: list[bool] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _FORKED.append(True))


@functools.cache
def function(library: Path, name: str, *arguments: type) -> Callable[..., None] | None:
    """A function of the library that returns nothing; None if there is no library or no such function, or if the package's
    own library was made of other sources than are there now."""
    if library == LIBRARY and not is_current(library, SOURCES):
        return None
    try:
        found = ctypes.CDLL(str(library))[name]
    except (OSError, AttributeError):
        return None
    found.argtypes = arguments
    found.restype = None
    return found


@functools.cache
def is_current(library: Path, sources: Path) -> bool:
    """Whether a library was made of these sources. Otherwise its functions may take other arguments, and calling one may
    write anywhere: so after an update, until it is compiled again. A library that is not current is warned of."""
    try:
        made_of = ctypes.c_char_p(ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(str(library)), STAMP)))
    except OSError:
        return False
    except ValueError:  # from before libraries had it
        made_of = ctypes.c_char_p(b"")
    files = sorted([*sources.glob("*.c"), *sources.glob("*.h")])
    digest = hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()
    if made_of.value != digest.encode():
        warnings.warn(
            f"{library.name} was compiled from other sources than clipless has now, so it is not used, and training is "
            "slower: install clipless again (pip install -e . in its folder).",
            stacklevel=2,
        )
        return False
    return True


def checked(
    build: Callable[[Path], Native | None],
    pairs: Callable[[Native], Iterable[tuple[Tensor, Tensor]]],
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Callable[..., Native | None]:
    """A function that returns the compiled form of a library, by default the package's, or None.

    None means that the library is missing, that it has no such function, or that it computes something else: `pairs` gives
    results of the compiled form beside the same by torch or numpy, and each pair must agree within the tolerances,
    by default exactly. Built and compared once for each library. The comparison is numpy's, because torch must not compute
    in a forked child.
    """

    @functools.cache
    def load(library: Path = LIBRARY) -> Native | None:
        with _plain_defaults():
            form = build(library)
            if form is None:
                return None
            same = (
                np.allclose(ours.numpy(), theirs.numpy(), rtol, atol, equal_nan=True) for ours, theirs in pairs(form)
            )
            return form if all(same) else None

    return load


def wave(*shape: int) -> Tensor:
    """Numbers between -1 and 1, none like its neighbours, for checks.

    >>> wave(3)
    tensor([-0.6702,  0.0000,  0.6702])
    """
    return torch.linspace(-3, 3, math.prod(shape)).mul_(17).sin_().view(shape)


@contextmanager
def _plain_defaults() -> Iterator[None]:
    """Inside, a new tensor is float32 in main memory unless it is told otherwise, and products are exact, whatever the
    program has chosen."""
    chosen = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_default_dtype(chosen)


def threads(work: int) -> int:
    """In how many threads so many bytes are best gone through: at most as many as torch uses, and one in a forked child,
    where OpenMP's threads are gone and would be waited for in vain.

    >>> threads(100)
    1
    """
    return 1 if _FORKED else max(1, min(torch.get_num_threads(), work // WORTH_A_THREAD))
