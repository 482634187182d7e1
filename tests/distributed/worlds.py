"""Starting real processes that train together."""

import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))  # for `make test-worlds`, which is no test

from children import Child, all_done  # noqa: E402


def start(scenario: str, size: int, folder: Path, timeout: int = 60) -> list[Child]:
    """Start so many ranks of a scenario, which wait `timeout` seconds for each other."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        Child(
            HERE / "one_rank.py", scenario, folder, str(timeout),
            cwd=folder, notes=folder, environment={"RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]  # fmt: skip


def finish(started: list[Child], folder: Path, seconds: float = 240) -> list[Any]:
    """What every rank left, one that was killed as well. All together have so many seconds: ranks that do not do the same
    may wait for each other for ever."""
    ended = all_done(started, seconds)
    outputs = [
        f"rank {rank}, {done.returncode}: {(done.stdout + done.stderr)[-6000:]}" for rank, done in enumerate(ended)
    ]
    assert all(done.returncode in (0, -9) for done in ended), "\n\n".join(outputs)
    return [torch.load(folder / f"{rank}.pt") for rank in range(len(started))]


def world(scenario: str, size: int, folder: Path, seconds: float = 240) -> list[Any]:
    """What every rank of a scenario gives."""
    return finish(start(scenario, size, folder), folder, seconds)
