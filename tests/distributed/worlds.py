"""Starting real processes that train together."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def start(scenario: str, size: int, folder: Path, timeout: int = 60) -> list["subprocess.Popen[bytes]"]:
    """Start so many ranks of a scenario, which wait `timeout` seconds for each other."""
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    started = []
    for rank in range(size):
        told = {"RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, str(HERE / "one_rank.py"), scenario, str(folder), str(timeout)]
        with open(folder / f"{rank}.txt", "w") as output:
            started.append(subprocess.Popen(command, env=os.environ | told, stdout=output, stderr=subprocess.STDOUT))
    return started


def finish(started: list["subprocess.Popen[bytes]"], folder: Path) -> list[Any]:
    """What every rank left, one that was killed as well."""
    try:
        for process in started:
            process.wait(timeout=400)
    finally:
        for process in started:
            process.kill()
            process.wait()
    outputs = [(folder / f"{rank}.txt").read_text()[-2000:] for rank in range(len(started))]
    assert all(process.returncode in (0, -9) for process in started), "\n\n".join(outputs)
    return [torch.load(folder / f"{rank}.pt") for rank in range(len(started))]


def world(scenario: str, size: int, folder: Path) -> list[Any]:
    """What every rank of a scenario gives."""
    return finish(start(scenario, size, folder), folder)
