"""Models that are wrapped, or sharded, after make_private."""

from collections.abc import Callable
from typing import Any

from shared_run import begin, network, refused, steps
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def wrapped_later(group: Any) -> dict[str, str]:
    """The model is put into something else after make_private, or make_private is given what is inside."""

    def tried(wrap: Callable[[nn.Module], nn.Module], inner: bool = False, **changes: Any) -> str:
        model = network()
        outer = wrap(model) if inner else None
        _, optimizer, private = begin(model, **({"group": group} | changes))
        try:
            return refused(lambda: next(steps(outer or wrap(model), optimizer, private)))
        finally:
            private.detach()

    def ddp(model: nn.Module, **options: Any) -> nn.Module:
        return DistributedDataParallel(model, process_group=group, **options)

    def shard(model: nn.Module) -> nn.Module:
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        return model

    return {
        "wrapped later": tried(ddp),
        "unused parameters": tried(lambda model: ddp(model, find_unused_parameters=True)),
        "given what is inside": tried(ddp, inner=True),
        "alone and wrapped later": tried(ddp, group=False),
        "sharded later": tried(shard),
    }
