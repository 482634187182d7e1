"""What clipless refuses, and with which exception.

Every message says what is wrong and what to do about it. Each class also derives from the built-in exception that a
caller would expect, so `except ValueError` works without knowing clipless.
"""

import difflib
import operator
from collections.abc import Iterable, Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


class CliplessError(Exception):
    """Base class of everything clipless raises on purpose."""


class InvalidArgument(CliplessError, ValueError):
    """A value that cannot be meant: epsilon <= 0, an unknown name, arguments that contradict each other."""


class InvalidType(CliplessError, TypeError):
    """An argument of the wrong kind: a list where a model is due."""


class UnsupportedModule(CliplessError, RuntimeError):
    """A module or a use of a parameter for which no bound per record exists."""


class Misuse(CliplessError, RuntimeError):
    """The training loop does something that would break the promise: a foreign batch, a step without its backward."""


class BudgetSpent(CliplessError, RuntimeError):
    """The planned number of private steps has been taken."""


class DamagedFile(CliplessError, ValueError):
    """A ledger or a checkpoint that is not what clipless wrote: damaged, cut short or edited."""


class TornLedger(DamagedFile):
    """A ledger whose last line is not whole, as a crash in the middle of a write leaves it."""


class LedgerInUse(CliplessError, RuntimeError):
    """Another process, or another run of this one, is writing this ledger."""


class ReplayDiffers(CliplessError, RuntimeError):
    """A repeated step does not release what it released before: the same noise would hide two different gradients."""


class Interrupted(CliplessError, RuntimeError):
    """Training was asked to stop, and stopped after a step with everything saved."""


class Unsound(CliplessError, RuntimeError):
    """`clipless.check` found that the model, the loss or the engine breaks the declared sensitivity."""


def named(kind: str, name: object, registry: Mapping[str, Entry]) -> Entry:
    """The entry of that name, or the error that names the nearest one."""
    if not isinstance(name, str) or name not in registry:
        raise unknown_name(kind, name, registry)
    return registry[name]


def whole(name: str, value: object) -> int:
    """The value as an int if it is a whole number of at least 1, be it Python's or NumPy's.

    >>> whole("steps", 3)
    3
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidType(f"{name} must be a whole number, got {value!r}.") from None
    if number < 1:
        raise InvalidArgument(f"{name} must be at least 1, got {number}.")
    return number


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> InvalidArgument:
    """The error for a name that is not in a registry, with the nearest one that is.

    >>> str(unknown_name("accountant", "pdl", ["pld", "rdp", "gdp"]))
    "unknown accountant 'pdl': did you mean 'pld'? Valid: 'pld', 'rdp', 'gdp'."
    """
    names = list(valid)
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InvalidArgument(f"unknown {kind} {name!r}: {hint}Valid: {', '.join(map(repr, names))}.")
