"""Atomic, durable writes: a file appears whole or not at all, and is on disk when the function returns."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o666) -> None:
    """Replace `path` atomically by a new file. A crash leaves the old file or the new one, never a mixture.

    `mode` is the permissions of the new file before the process's umask.
    """
    part = write_part(path, write, mode)
    try:
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_part(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o666) -> Path:
    """Write a complete file next to `path`, flushed to disk, and return its path; the caller moves it into place.

    Its name is random: processes in containers that share a volume may have the same number.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
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
    """Flush a folder's entries to disk, so that a new or renamed file survives a power cut. POSIX only."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
