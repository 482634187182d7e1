"""SIGINT and SIGTERM, handled between two steps."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether a signal asked the run to stop. Before the first call, and at a second signal, the process ends at once; the
    files on disk are sound at any moment."""

    def __init__(self) -> None:
        self.signal = 0
        self._listening = False

    def __call__(self) -> bool:
        self._listening = True
        return self.signal != 0

    @property
    def exit_code(self) -> int:
        """That of the signal, or of an interrupt if another process was asked."""
        return 128 + (self.signal or signal.SIGINT)

    def receive(self, number: int, frame: FrameType | None) -> None:
        insisting = self.signal != 0
        self.signal = number
        if insisting or not self._listening:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(self.exit_code)


@contextmanager
def stopping() -> Iterator[Stop]:
    """Handle SIGINT and SIGTERM inside the block. A signal that is ignored stays ignored."""
    stop = Stop()
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop.receive) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
