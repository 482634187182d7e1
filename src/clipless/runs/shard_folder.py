"""The folder with the sharded tensors of a checkpoint, beside its file, which names the folder and has the digest of every
file in it. The checkpoint's file is written last, so a checkpoint is whole or the one before it."""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipless.errors import DamagedFile
from clipless.runs.durable_files import sync_folder


def shard_folder(path: Path, token: str) -> Path:
    """The folder of that token, for a checkpoint at `path`."""
    return path.with_name(f"{path.name}.shards.{token}")


def digests(folder: Path, rank: int, ranks: int) -> dict[str, str]:
    """Digests of one rank's share of the files; the folder is on disk when this returns."""
    sync_folder(folder)
    names = sorted(file.name for file in folder.iterdir())
    return {name: _digest(folder / name) for name in names[rank::ranks]}


def refuse_damaged_shards(shards: Mapping[str, Any], path: Path, rank: int, ranks: int) -> None:
    """Raises `DamagedFile` unless one rank's share of the files is as written."""
    for name in sorted(shards["files"])[rank::ranks]:
        file = path.with_name(shards["folder"]) / name
        if not file.is_file() or _digest(file) != shards["files"][name]:
            raise DamagedFile(f"{file}, a part of the checkpoint {path}, is missing or damaged. Use an earlier copy.")


def remove_old_shards(path: Path, kept: Mapping[str, Any] | None) -> None:
    """Remove the folders of earlier checkpoints at `path`."""
    for folder in path.parent.glob(f"{path.name}.shards.*"):
        if kept is None or folder.name != kept["folder"]:
            shutil.rmtree(folder, ignore_errors=True)


def _digest(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
