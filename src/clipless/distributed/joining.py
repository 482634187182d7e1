"""Which processes train a run together: those of a torch.distributed group, or this one alone."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from clipless.distributed.ranks import Alone, Ranks
from clipless.errors import InvalidArgument, InvalidType, Misuse
from clipless.processes import refuse_other_processes

if TYPE_CHECKING:
    from clipless.distributed.shards import Sharded


def ranks_of(group: object) -> Alone | Ranks:
    """The processes that train together. `group=None` takes the default process group if there is one; `group=False` means
    that this process trains alone."""
    if group is not None and group is not False and not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise InvalidArgument("this rank is not in the group: call make_private on the ranks of the group only.")
        raise InvalidType(
            "group must be a process group of torch.distributed, None for the default one, or False where this process "
            f"trains alone; got {group!r}."
        )
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return Ranks(group) if dist.get_world_size(group) > 1 else Alone()
    refuse_other_processes(group, os.getpid())
    return Alone()


def unwrapped(model: Any, group: object) -> tuple[Any, "Idle"]:
    """The model inside its DistributedDataParallel, if it is in one, and what keeps that idle. Refuses other wrappers."""
    ddp = model if isinstance(model, DistributedDataParallel) else None
    inside = model if ddp is None else ddp.module
    _refuse_wrapped(inside)
    if is_sharded(inside):
        if ddp is not None:
            raise Misuse("a sharded model is wrapped in DistributedDataParallel: give make_private the model inside.")
        from clipless.distributed.shards import refuse_shards

        refuse_shards(inside, group)
    if ddp is not None:
        _refuse_settings(ddp, group)
    return inside, Idle(ddp)


def is_sharded(model: object) -> bool:
    """Whether any parameter of the model is a DTensor. Asked by name: importing that class takes half a second."""
    return isinstance(model, nn.Module) and any(type(p).__name__ == "DTensor" for p in model.parameters())


def shards_of(model: nn.Module, ranks: Alone | Ranks) -> "Sharded | None":
    """The shards of a sharded model."""
    if not is_sharded(model):
        return None
    from clipless.distributed.shards import Sharded

    return Sharded(model, ranks)


class Detachable(Protocol):
    """What was put on a model and can be taken off again."""

    def detach(self) -> None: ...


T = TypeVar("T", bound=Detachable)


def on_every_rank(ranks: Alone | Ranks, make: Callable[[], T]) -> T:
    """What `make` returns, if it returns on every rank; otherwise it is detached again where it did."""
    made: T | None = None
    try:
        with ranks.together("make_private"):
            made = make()
    except BaseException:
        if made is not None:
            made.detach()
        raise
    return made


def broadcast_weights(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the first rank's parameters and buffers. Call it on every rank, before make_private and before
    fully_shard."""
    if is_sharded(model):
        raise Misuse("the model is sharded: every rank has a part of the weights, and no two have the same ones.")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)


class Idle:
    """Keeps a DistributedDataParallel from sending anything: sums are added up over the ranks once they are clipped."""

    def __init__(self, ddp: DistributedDataParallel | None) -> None:
        self._ddp = ddp
        self._paused: AbstractContextManager[None] | None = None

    def attach(self) -> "Idle":
        if self._ddp is not None:
            self._paused = self._ddp.no_sync()
            self._paused.__enter__()
            self._ddp.require_forward_param_sync = False
        return self

    def remove(self) -> None:
        if self._ddp is not None and self._paused is not None:
            self._paused.__exit__(None, None, None)
            self._ddp.require_forward_param_sync, self._paused = True, None


def _refuse_wrapped(model: object) -> None:
    """Refuse what averages or shards gradients that are not private yet."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, DistributedDataParallel):
            raise Misuse(
                f"module {name!r} is wrapped in DistributedDataParallel, which averages gradients that are not private yet: "
                "wrap the whole model, or nothing of it."
            )
        if isinstance(module, DataParallel) or type(module).__name__ == "FullyShardedDataParallel":
            raise Misuse(
                f"the model is wrapped in {type(module).__name__}, which averages gradients that are not private yet: give "
                "make_private the model inside (model.module), start one process for each device, and shard with "
                "fully_shard (docs/distributed.md)."
            )


def _refuse_settings(model: DistributedDataParallel, group: object) -> None:
    if group is False:
        raise Misuse(
            "the model is wrapped in DistributedDataParallel, and group=False says that this process trains alone: leave "
            "group unset, or give make_private the model inside (model.module)."
        )
    for name in ("static_graph", "mixed_precision"):
        if vars(model).get(name):
            raise Misuse(
                f"DistributedDataParallel with {name} takes part in the backward pass, where no gradient is private yet: "
                f"build it without {name}."
            )
