"""Where the files of a named data set are looked for, and the message if they are missing. Nothing is downloaded."""

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clipless.errors import InvalidArgument

VARIABLE = "CLIPLESS_DATA"
SYSTEM_FOLDERS = (Path("/usr/share/datasets"),)  # where Debian's packages dataset-* put their files


@dataclass(frozen=True)
class Source:
    """The files of a data set: the folders in which they may lie below a data folder, and how to get them."""

    name: str
    folders: tuple[str, ...]
    remedy: str


def data_folders(data_dir: str | Path | None = None) -> list[Path]:
    """The folders to look in: `data_dir` alone if given, else those of CLIPLESS_DATA and of the system's packages."""
    if data_dir is not None:
        return [Path(data_dir).expanduser()]
    listed = [Path(part).expanduser() for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    return [*listed, *SYSTEM_FOLDERS]


def find(source: Source, files: Sequence[str], data_dir: str | Path | None) -> list[Path]:
    """The paths of these files, plain or gzipped, all in one folder.

    Raises InvalidArgument that names the folders looked in, the first file that is missing from the best of them, and how
    to get it.
    """
    best: tuple[int, Path, str] | None = None
    for folder in _places(source, data_folders(data_dir)):
        found = [existing(folder, file) for file in files]
        if None not in found:
            return [path for path in found if path is not None]
        present, missing = sum(path is not None for path in found), files[found.index(None)]
        if present and (best is None or present > best[0]):
            best = present, folder, missing
    if best is not None:
        raise InvalidArgument(f"{source.name}: {best[1]} lacks {best[2]}. {source.remedy}")
    raise InvalidArgument(f"{source.name}: no {files[0]} {_searched(source, data_dir)}. {source.remedy}")


def find_any(source: Source, sets: Sequence[Sequence[str]], data_dir: str | Path | None) -> tuple[int, list[Path]]:
    """The number of the first set of files that is complete, and its paths. Raises as `find` does for the first set."""
    refusals = []
    for number, files in enumerate(sets):
        try:
            return number, find(source, files, data_dir)
        except InvalidArgument as error:
            refusals.append(error)
    raise refusals[0]


def existing(folder: Path, file: str) -> Path | None:
    """The file in this folder, plain or with .gz."""
    return next((path for path in (folder / file, folder / f"{file}.gz") if path.is_file()), None)


def contents(path: Path) -> bytes:
    """The bytes of a file, decompressed if its name ends in .gz. Raises InvalidArgument if it is damaged."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidArgument(f"{path} cannot be read ({error}). Fetch it again.") from error


def text(path: Path) -> str:
    """The text of a UTF-8 file. Raises InvalidArgument if it is damaged or of another encoding."""
    try:
        return contents(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is not UTF-8 text. Fetch it again.") from None


def _places(source: Source, folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        for name in source.folders:
            yield folder / name
        yield folder


def _searched(source: Source, data_dir: str | Path | None) -> str:
    folders = ", ".join(str(folder) for folder in data_folders(data_dir))
    return f"in {folders} (nor in {', '.join(source.folders)} there; set --data-dir or {VARIABLE})"
