"""Standard output and standard error, tried before any work is done, and given up without losing a run."""

import errno
import io
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer

from clipless.app.terminal import output
from clipless.errors import InvalidArgument

UNWRITABLE = 1


def prepare_streams() -> None:
    """Open closed streams on the null device, so that no file of a run takes their place, and let every character be
    shown: those that the stream has no code for as escapes."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def refuse_unwritable() -> None:
    """Raises InvalidArgument if standard output or standard error cannot be written: better known before the work."""
    for stream, name in ((sys.stdout, "standard output"), (sys.stderr, "standard error")):
        try:
            descriptor = stream.fileno()
        except (AttributeError, OSError, ValueError):  # closed, or captured by a program
            continue
        try:
            _try(descriptor)
        except OSError as error:
            raise InvalidArgument(
                f"{name} cannot be written ({error}): send it to a terminal, a pipe that is read, or a file on a disk with "
                "room. Nothing was begun."
            ) from error


@contextmanager
def showing_run(folder: Path) -> Iterator[None]:
    """Around the output about a run that is saved. If it cannot be written, says how to see it; nothing is lost."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        _give_up(sys.stdout)
        with suppress(OSError):
            output.show_error(
                f"the run is finished and saved in {folder}, but its summary could not be written ({error}). Do not run it "
                f"again. To see it:  clipless report {folder}"
            )
        raise typer.Exit(UNWRITABLE) from None


def unfailing(report: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same report, which ends with a warning when it cannot be written any more, and never ends the run."""
    working = True

    def reported(progress: Any) -> None:
        nonlocal working
        if working:
            try:
                report(progress)
            except OSError as error:
                working = False
                with suppress(OSError):
                    output.show_warning(f"Progress cannot be written any more ({error}). The run continues.")

    return reported


def _try(descriptor: int) -> None:
    """Raises OSError if nothing can be written, as far as that can be told without writing."""
    os.write(descriptor, b"")
    if sys.platform == "win32":
        return
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        space = os.fstatvfs(descriptor)
        if space.f_blocks and not space.f_bavail:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
        waiting = select.poll()
        waiting.register(descriptor, select.POLLOUT)
        if any(events & (select.POLLERR | select.POLLNVAL) for _, events in waiting.poll(0)):
            raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))


def _give_up(stream: Any) -> None:
    """Drop what is buffered, which Python would try to write once more at its end."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
