"""Models that are wrapped, sharded or compiled, and optimizers that do more than step, before make_private and after it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from shared_run import PLAN, begin, dataset, network, refused, released, steps
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import SGD, Optimizer

import clipless

Wrap = Callable[[nn.Module], nn.Module]


def wrappers(group: Any) -> dict[str, Wrap]:
    """What people put models into."""
    mesh = DeviceMesh.from_group(group, "cpu")
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    members = [[rank] for rank in dist.get_process_group_ranks(group)]
    grid = DeviceMesh.from_group([group, own], "cpu", mesh=members, mesh_dim_names=("copies", "shards"))

    def ddp(**options: Any) -> Wrap:
        return lambda model: DistributedDataParallel(model, process_group=group, **options)

    def fsdp(originals: bool, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> Wrap:
        device = torch.device("cpu")
        return lambda model: FullyShardedDataParallel(
            model, process_group=group, use_orig_params=originals, sharding_strategy=strategy, device_id=device
        )

    def shard(model: nn.Module) -> nn.Module:
        fully_shard(model, mesh=mesh)
        return model

    def shard_copies(model: nn.Module) -> nn.Module:
        fully_shard(model, mesh=grid)
        return model

    def divide(model: nn.Module) -> nn.Module:
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    return {
        "ddp": ddp(),
        "ddp, unused parameters": ddp(find_unused_parameters=True),
        "data parallel": DataParallel,
        "fsdp1": fsdp(False),
        "fsdp1, original parameters": fsdp(True),
        "fsdp1, not sharded": fsdp(True, ShardingStrategy.NO_SHARD),
        "fully_shard": shard,
        "fully_shard, copies": shard_copies,
        "tensor parallel": divide,
        "compiled": lambda model: torch.compile(model, backend="aot_eager"),  # type: ignore[dict-item]
    }


def wrapped(group: Any) -> dict[str, str]:
    """The model is put into something before make_private, after it, or make_private is given what is inside."""

    def before(wrap: Wrap) -> str:
        return refused(lambda: begin(wrap(network()), group=group)[2].detach())

    def after(wrap: Wrap, inner: bool = False, **changes: Any) -> str:
        model = network()
        outer = wrap(model) if inner else None
        _, optimizer, private = begin(model, **({"group": group} | changes))
        try:
            found = refused(lambda: next(steps(outer or wrap(model), optimizer, private)))
            return f"{found} ({private.ledger.steps} steps)"
        finally:
            private.detach()

    known = wrappers(group)
    said = {f"{name}, before": before(wrap) for name, wrap in known.items()}
    said |= {f"{name}, after": after(wrap) for name, wrap in known.items()}
    said["fsdp1, after a step"] = later(known["fsdp1, original parameters"], group)
    said["ddp, given what is inside"] = after(known["ddp"], inner=True)
    said["ddp, alone and after"] = after(known["ddp"], group=False)
    said["data parallel, alone and after"] = after(known["data parallel"], group=False)
    return said | optimizers(group)


def later(wrap: Wrap, group: Any) -> str:
    """The model is wrapped when a steady run would not look at what its parameters hold."""
    model, optimizer, private = begin(group=group, steps=8)
    training = steps(model, optimizer, private)
    for _ in range(6):
        next(training)
    outer = wrap(model)

    def step() -> None:
        optimizer.zero_grad()
        x, y = next(iter(private.loader))
        private.backward(torch.nn.functional.cross_entropy(outer(x), y, reduction="none"))
        optimizer.step()

    try:
        return f"{refused(step)} ({private.ledger.steps} steps)"
    finally:
        private.detach()


def optimizers(group: Any) -> dict[str, str]:
    """Optimizers that hold another one. They are imported here, because that warns of torch.jit."""
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    def tried(make: Callable[[nn.Module], Optimizer]) -> str:
        model = network()
        settings = PLAN | {"steps": 3, "group": group}
        return refused(lambda: clipless.make_private(model, make(model), dataset(), **settings))

    averager = PeriodicModelAverager(period=1, process_group=group)
    return {
        "zero": tried(lambda model: ZeroRedundancyOptimizer(model.parameters(), SGD, process_group=group, lr=0.1)),
        "local sgd": tried(lambda model: PostLocalSGDOptimizer(SGD(model.parameters(), lr=0.1), averager)),
    }


def averaged(group: Any) -> list[torch.Tensor]:
    """Weights that are averaged over the ranks after every step, though they are the same."""
    averager = PeriodicModelAverager(period=1, process_group=group)
    model, optimizer, private = begin(group=group)
    for _ in steps(model, optimizer, private):
        averager.average_parameters(model.parameters())
    private.detach()
    return [p.detach().clone() for p in model.parameters()]


def joined(group: Any) -> list[torch.Tensor]:
    """In the context that torch has for ranks with unequal numbers of batches, which ours have not; of parts they have."""
    model = DistributedDataParallel(network(), process_group=group)
    _, optimizer, private = begin(model, group=group)
    with model.join():
        list(steps(model, optimizer, private, micro=1))
    private.detach()
    return [p.detach().clone() for p in model.parameters()]


def in_buckets(group: Any) -> list[torch.Tensor]:
    """Gradients that DistributedDataParallel would keep in its buckets."""
    model = DistributedDataParallel(network(), process_group=group, gradient_as_bucket_view=True)
    found: list[torch.Tensor] = released(model, group=group)["weights"]
    return found
