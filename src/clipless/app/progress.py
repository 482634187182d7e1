"""The type of the callbacks to which long work reports its progress."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
# What is being done, how much is done, and of how much.
OnProgress = Callable[[str, float, float], None]


def ignored(what: str, done: float, total: float) -> None:
    """Nobody looks."""


def reported(what: str, parts: Sequence[T], on_progress: OnProgress) -> Iterator[T]:
    """The parts of a piece of work, one after the other, each reported when it begins.

    >>> list(reported("counting", "ab", print))
    counting 0 2
    counting 1 2
    ['a', 'b']
    """
    for number, part in enumerate(parts):
        on_progress(what, number, len(parts))
        yield part
