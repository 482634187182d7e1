"""What a process asks of the disk, in order: what is synchronised, how much was in it by then, and what is moved."""

import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Call(NamedTuple):
    """`inode` and `size` are those of the file or folder at the time of the call; of a folder, the size is 0."""

    name: str
    inode: int
    size: int


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """A list that grows with every call of the system's fsync, link and replace, which are carried out all the same."""
    calls: list[Call] = []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        status = os.fstat(descriptor)
        folder = stat.S_ISDIR(status.st_mode)
        calls.append(Call("sync folder" if folder else "sync file", status.st_ino, 0 if folder else status.st_size))
        fsync(descriptor)

    def moved(name: str) -> Any:
        move = getattr(os, name)

        def moving(source: Path, target: Path) -> None:
            status = os.stat(source)
            calls.append(Call(name, status.st_ino, status.st_size))
            move(source, target)

        return moving

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("link", "replace"):
        monkeypatch.setattr(os, name, moved(name))
    return calls
