"""Writing the ledger file: every event is on disk before its result can be seen."""

import os
import secrets
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clipless.accounting.events import Event, StepEvent
from clipless.accounting.ledger import Ledger
from clipless.errors import InvalidArgument, LedgerInUse, Misuse, ReplayDiffers
from clipless.runs.durable_files import replace_file, sync_folder, write_part
from clipless.runs.ledger_file import Entry, LedgerFile, entry_line, header_line, parse, read_ledger

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no flock
    fcntl = None  # type: ignore[assignment]

_OPEN: "weakref.WeakSet[Journal]" = weakref.WeakSet()
_TAIL = 80  # bytes at the end of a line, which hold its hash


class Journal:
    """The ledger file of one run, locked against every other writer.

    Before and after each write the path must hold the file that is written, and nothing else may have changed it: a file
    that was replaced, deleted or cut would miss steps that are released.

    After `resume`, the events between the checkpoint and the crash are *pending*: the run repeats them, and each must
    come out as recorded. Only then are new ones written.
    """

    def __init__(self, path: Path, descriptor: int, found: LedgerFile, position: int) -> None:
        self.path, self.run = path, found.run
        self._place = path.resolve()  # which links, folders on the way and the current folder change no more
        self.position, self.head = position, found.hash_at(position)
        self._pending = deque(found.entries[position:])
        self._pending_steps = sum(isinstance(entry.event, StepEvent) for entry in self._pending)
        self._torn = found.torn
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._tail = _end(descriptor, self._size)
        self._closed = weakref.finalize(self, os.close, descriptor)
        _OPEN.add(self)

    @classmethod
    def create(
        cls, path: Path, delta: float, accountant: str, planned: Ledger, plan: Mapping[str, object], past: Ledger
    ) -> "Journal":
        """A new file, which must not exist yet, with the events of `past` in it. It appears whole or not at all."""
        header = header_line(secrets.token_hex(16), delta, accountant, planned, plan)
        lines, last = [header], parse(path, header).start
        for event in (event for event, count in past.events for _ in range(count)):
            line, entry = entry_line(len(lines), last, event, None)
            lines.append(line)
            last = entry.hash
        try:
            part = write_part(path, lambda file: file.writelines(lines))
            try:
                descriptor = _open_locked(part)
                os.link(part, path)
            finally:
                part.unlink()
            sync_folder(path.parent)
        except FileExistsError:
            raise InvalidArgument(
                f"{path} exists already, and a ledger is never overwritten: resume its run, or choose another file."
            ) from None
        except OSError as error:
            raise InvalidArgument(f"cannot write the ledger {path} ({error}). Choose another place.") from error
        return cls(path, descriptor, read_ledger(path), len(past))

    @classmethod
    def resume(cls, path: Path, run: str, position: int, head: str) -> tuple["Journal", LedgerFile]:
        """The journal of an interrupted run, to be resumed after its first `position` events, and the ledger's contents."""
        if not path.exists():
            raise InvalidArgument(
                f"the ledger {path} is missing, and without it what was spent after the checkpoint is unknown: put the "
                "file back."
            )
        descriptor = _open_locked(path)
        try:
            found = _without_zeros(read_ledger(path, torn=True), descriptor)
            if found.run != run:
                raise InvalidArgument(
                    f"{path} is the ledger of another run than the checkpoint: give the ledger that was written with it."
                )
            if position > len(found.entries) or found.hash_at(position) != head:
                raise InvalidArgument(
                    f"{path} is older than the checkpoint or was changed: its line {position + 1} is not the one that the "
                    "checkpoint was saved after. Give the ledger that was written with it."
                )
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, found, position), found

    def place(self) -> dict[str, Any]:
        """The ledger's run, position and head, as a checkpoint stores them."""
        return {"run": self.run, "position": self.position, "head": self.head}

    @property
    def pending(self) -> int:
        """The number of recorded steps still to be repeated."""
        return self._pending_steps

    def record(self, event: Event, fingerprint: str | None) -> bool:
        """Write the event to disk. Returns True for a new event, False for a repeated one, which is there already.

        Raises `ReplayDiffers` if a repeated event is not the one recorded; its result must not be shown then.
        """
        self.refuse_lost()
        if self._pending:
            expected = self._pending[0]
            if fingerprint is None or (expected.event, expected.fingerprint) != (event, fingerprint):
                raise ReplayDiffers(self._difference("releases something else than what"))
            self._skip_repeated()
            return False
        line, entry = entry_line(self.position + 1, self.head, event, fingerprint)
        if not line.startswith(self._torn):
            raise ReplayDiffers(self._difference("is not the one that"))
        self._append(line[len(self._torn) :])
        self._torn = b""
        self._advance(entry)
        return True

    def give_up_pending(self, found: LedgerFile) -> None:
        """Leave recorded steps counted instead of repeating them; a torn line is replaced by a planned step."""
        while self._pending:
            self._skip_repeated()
        if self._torn:
            self._size -= len(self._torn)
            os.ftruncate(self._descriptor, self._size)
            self._torn, self._tail = b"", _end(self._descriptor, self._size)
            self.record(found.planned_step(found.recorded().steps), None)

    def refuse_lost(self) -> None:
        """Raises `Misuse`, and ends the run's recording, unless the path still holds all that was recorded.

        A file that was deleted or replaced can be read as long as it is open, so a copy of it is saved next to it.
        """
        if not self._closed.alive:
            raise Misuse(
                f"the ledger {self.path} is closed after a failed write or detach(): resume from a checkpoint."
            )
        found, ours = _identity(self._place), os.fstat(self._descriptor)
        intact = ours.st_size == self._size and _end(self._descriptor, self._size) == self._tail
        if intact and found == (ours.st_dev, ours.st_ino):
            return
        how = "changed" if not intact else "deleted or moved" if found is None else "replaced"
        remedy = (
            self._copied() if intact else f"put back a copy that contains the line with hash {self.head}, and resume"
        )
        self.close()
        raise Misuse(
            f"the ledger {self.path} was {how} while this run was writing it, so nothing more is released: {remedy}. "
            "Keep tools that synchronize, restore or clean up away from the folder of a run."
        )

    def close(self) -> None:
        """Release the file to other processes. Nothing can be recorded afterwards."""
        self._closed()

    def _copied(self) -> str:
        """Save what was recorded in a file of its own; returns what to do with it."""
        copy = self._place.with_name(f"{self._place.stem}.{self.run[:8]}{self._place.suffix}")
        content = _read(self._descriptor, 0, self._size)
        try:
            replace_file(copy, lambda file: file.write(content))
        except OSError as error:
            return f"what was recorded could not be saved again ({error}); {self.position} steps were taken, and stay spent"
        return f"what was recorded is in {copy}; move it to {self._place}, and resume"

    def _skip_repeated(self) -> None:
        entry = self._pending.popleft()
        self._pending_steps -= isinstance(entry.event, StepEvent)
        self._advance(entry)

    def _advance(self, entry: Entry) -> None:
        self.position, self.head = self.position + 1, entry.hash

    def _append(self, content: bytes) -> None:
        try:
            written = 0
            while written < len(content):
                written += os.write(self._descriptor, content[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            self.close()
            raise Misuse(
                f"cannot write to the ledger {self.path} ({error}), so this step was not released. Make room, then resume."
            ) from error
        self._size, self._tail = self._size + len(content), (self._tail + content)[-_TAIL:]
        self.refuse_lost()

    def _difference(self, how: str) -> str:
        return (
            f"step {self.position + 1} of {self.path} was taken before the interruption, and repeating it {how} was "
            "recorded. The same noise on two gradients would show their difference, so nothing was released. Go on with "
            "the same code, settings, data and threads as before; or resume with reseed=True (--reseed), which takes new "
            "noise and leaves the lost steps counted."
        )


def _without_zeros(found: LedgerFile, descriptor: int) -> LedgerFile:
    """A power cut can leave zeros at the end of a file; no line contains them."""
    torn = found.torn.split(b"\0")[0]
    if torn != found.torn:
        os.ftruncate(descriptor, os.lseek(descriptor, 0, os.SEEK_END) - len(found.torn) + len(torn))
    return replace(found, torn=torn)


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file is at a path; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _end(descriptor: int, size: int) -> bytes:
    """The last bytes of a file of that size."""
    return _read(descriptor, max(0, size - _TAIL), size)


def _read(descriptor: int, start: int, stop: int) -> bytes:
    content = b""
    while start + len(content) < stop:
        os.lseek(descriptor, start + len(content), os.SEEK_SET)
        part = os.read(descriptor, stop - start - len(content))
        if not part:
            break
        content += part
    return content


def _open_locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise LedgerInUse(
                f"another process is writing the ledger {path}: wait for it or stop it. Two runs need two ledgers."
            ) from None
    return descriptor


def _close_in_child() -> None:
    for journal in list(_OPEN):
        journal.close()


# A worker process that outlives a killed run would otherwise keep the lock, and could write.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
