"""One rank: `python one_rank.py NAME FOLDER TIMEOUT`, with RANK and WORLD_SIZE in the environment, runs the scenario of that
name and leaves what it gave in FOLDER."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import scenarios
import sharded_scenarios
import torch
import torch.distributed as dist
import world_scenarios


def main(name: str, folder: Path, timeout: float) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / name}.store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    scenario: Callable[[Path], Any] = (vars(scenarios) | vars(sharded_scenarios) | vars(world_scenarios))[name]
    torch.save(scenario(folder), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
