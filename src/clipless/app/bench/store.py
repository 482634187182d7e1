"""Where results are kept: a folder for each machine, and in it a file with and one without the variables of the allocator.

glibc reads the variables when a process starts, so other settings need a new process.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from clipless.app.bench import results
from clipless.app.bench.machine import slug
from clipless.app.bench.results import BenchResult
from clipless.errors import InvalidArgument

# They make glibc keep the memory that a step has freed, instead of asking the operating system for it at the next.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "8000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
SUFFIX = "-malloc"


def environment(malloc: bool) -> dict[str, str]:
    """This process's environment with the two variables, or without any of the allocator's."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return others | (MALLOC if malloc else {})


def suffix(allocator: Mapping[str, str]) -> str:
    """What the names of files get that were measured with these variables of the allocator.

    >>> suffix({}), suffix({"MALLOC_TRIM_THRESHOLD_": "8"})
    ('', '-malloc')
    """
    return SUFFIX if allocator else ""


def place(result: BenchResult, folder: Path) -> Path:
    """The file for a result in a folder of many machines."""
    return folder / slug(result.machine) / f"bench{suffix(result.machine.get('allocator', {}))}.json"


def keep(result: BenchResult, folder: Path) -> None:
    """Store a result in its place, over the one that was there."""
    path = place(result, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    results.save(result, path)


def load(path: Path) -> dict[Path, BenchResult]:
    """The result in a file, or all that a folder holds, by file. Raises InvalidArgument if there is none."""
    files = sorted(path.rglob("bench*.json")) if path.is_dir() else [path]
    if not files:
        raise InvalidArgument(f"{path} holds no result of clipless bench. Give a file or a folder that it wrote.")
    return {file: results.load(file) for file in files}
