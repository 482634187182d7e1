"""Runs of two ranks that are open when one of these is killed, and how other numbers of ranks go on with them."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from shared_run import begin, network, refused, steps, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import clipless

# What the model of each pair of ranks is; the files are in a folder of that name.
OPEN = ("whole", "shards")
# Runs that nothing ends but the end of their process.
STILL_OPEN: list[Any] = []


def begin_open(kind: str, group: Any = None) -> tuple[nn.Module, Optimizer, clipless.Private]:
    """A run that is the same, but for rounding, with any number of ranks."""
    model = network()
    if kind == "shards" and dist.is_initialized():
        fully_shard(model, mesh=DeviceMesh.from_group(group or dist.group.WORLD, "cpu"))
    return begin(model, steps=6, group=group)


def left_open(folder: Path, group: Any, lost: int) -> None:
    """Three steps, with a checkpoint before the last `lost` of them. Nothing is closed: the next that happens to a rank of
    this run is its end."""
    folder.mkdir(exist_ok=True)
    model, optimizer, private = begin_open(folder.name, group)
    private.save_to(folder / f"{lost}.jsonl")
    training = steps(model, optimizer, private)
    for number in range(3):
        next(training)
        if number == 2 - lost:
            private.save_checkpoint(folder / f"{lost}.pt")
    STILL_OPEN.append((training, private))


def gone_on(folder: Path) -> dict[str, Any]:
    """A run without lost steps goes on to its end, one with a lost step repeats it or gives it up."""
    model, optimizer, private = begin_open(folder.name)
    private.load_checkpoint(folder / "0.pt")
    said: dict[str, Any] = {"begun": private.steps_taken, "gradients": list(steps(model, optimizer, private))}
    said |= {"steps": private.ledger.steps, "weights": [whole(p.detach()).clone() for p in model.parameters()]}
    private.detach()
    model, optimizer, private = begin_open(folder.name)
    private.load_checkpoint(folder / "1.pt")
    said["repeated"] = refused(lambda: next(steps(model, optimizer, private)))
    private.detach()
    model, optimizer, private = begin_open(folder.name)
    private.load_checkpoint(folder / "1.pt", reseed=True)
    said["given up"] = [private.steps_taken, len(list(steps(model, optimizer, private))), private.ledger.steps]
    private.detach()
    return said
