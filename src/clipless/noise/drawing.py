"""How the numbers of a release are laid out, and handed out from several threads."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from clipless.noise.threads import share

Number = TypeVar("Number", bound=np.floating[Any])


class Span(NamedTuple):
    """Consecutive elements of one flattened tensor."""

    tensor: int
    start: int
    stop: int


def blocks(sizes: Iterable[int], length: int) -> list[list[Span]]:
    """The elements of all tensors, laid end to end and cut into blocks of `length`, the last one shorter.

    >>> [[tuple(span) for span in block] for block in blocks([3, 0, 6], 4)]
    [[(0, 0, 3), (2, 0, 1)], [(2, 1, 5)], [(2, 5, 6)]]
    """
    cut: list[list[Span]] = []
    room = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            if not room:
                cut.append([])
                room = length
            stop = min(size, start + room)
            cut[-1].append(Span(tensor, start, stop))
            room -= stop - start
            start = stop
    return cut


def hand_out(
    sizes: Iterable[int],
    length: int,
    drawer: Callable[[], Callable[[int, int], npt.NDArray[Number]]],
    write: Callable[[Span, npt.NDArray[Number]], None],
) -> None:
    """Hand numbers for tensors of these sizes, span by span, to `write`, which may overwrite them.

    Every thread asks `drawer` for a function of its own that draws so many numbers of the block of that number; what it
    returns is used up before it is called again.
    """

    def work(numbered: Iterator[tuple[int, list[Span]]]) -> None:
        draw = drawer()
        for number, spans in numbered:
            noise = draw(number, sum(stop - start for _, start, stop in spans))
            done = 0
            for span in spans:
                count = span.stop - span.start
                write(span, noise[done : done + count])
                done += count

    share(list(enumerate(blocks(sizes, length))), work)
