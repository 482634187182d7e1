"""Files that are on disk when a function says so, and that appear whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o666) -> None:
    """Put a new file in the place of `path` in one move. A crash leaves the old file or the new one, never a mixture.

    `mode` are the permissions of the new file, less what the process's umask takes away.
    """
    part = write_part(path, write, mode)
    try:
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_part(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o666) -> Path:
    """A whole file beside `path`, on disk, which the caller moves into place."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        with open(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return part


def sync_folder(folder: Path) -> None:
    """Make a new or renamed entry of the folder survive a power cut, where the system can say so."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
