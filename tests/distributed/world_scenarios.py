"""Sharded runs in every world of one to four ranks, for `all_worlds.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from scenarios import CASES, case, pure_noise
from sharded_scenarios import few, model_of, sharded, trained
from shared_run import between, network

MODELS = ("encoder", "lora", "checkpointed", "attention")
SOME = (CASES[::8], MODELS[-1:])


def worlds_among(ranks: int) -> dict[int, list[int]]:
    """Members of the worlds that are made of so many ranks: the last ones."""
    return {size: list(range(ranks - size, ranks)) for size in range(1, ranks + 1)}


def sharded_worlds(
    folder: Path, cases: Sequence[tuple[str, str]] = CASES, models: Sequence[str] = MODELS
) -> dict[Any, Any]:
    """Every clipping and partition, batches of one record, noise, and models trained in parts."""
    said: dict[Any, Any] = {}
    worlds = worlds_among(dist.get_world_size())
    groups = {size: between(members) for size, members in worlds.items()}
    for size, members in worlds.items():
        if dist.get_rank() not in members:
            continue
        group = groups[size]
        said[size] = {
            f"{name} {parts}": case(name, parts, model=sharded(network(), group), group=group) for name, parts in cases
        }
        said[size] |= {"noise": pure_noise(group, lambda model: sharded(model, group)), "few": few(group)}  # noqa: B023
        said[size] |= {f"sharded {name}": trained(sharded(model_of(name), group), group=group) for name in models}
        said[size] |= {f"whole {name}": trained(model_of(name), group=group) for name in models}
    return said


def some_sharded_worlds(folder: Path) -> dict[Any, Any]:
    """The same with few of them."""
    return sharded_worlds(folder, *SOME)
