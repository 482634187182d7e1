"""Models sharded by FSDP2, `torch.distributed.fsdp.fully_shard`: parameters are DTensors, gathered while their module runs.

FSDP2's own reduction stays idle, because every parameter is frozen while its module runs, so no gradient ever arrives at a
parameter. Clipped sums go to the ranks that hold the parameters' shards by a reduce-scatter of our own, in one order.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from clipless.distributed.ranks import Alone, Ranks
from clipless.errors import MissingLibrary, Misuse

# The most bytes that are handed to one reduce-scatter.
PIECE = 4 * 2**20
HOW = (
    "call fully_shard on blocks of the model and then on the model itself, in one group of all ranks, and build the "
    "optimizer after that (docs/distributed.md)."
)


# The versions of torch with which sharded runs were tested. With 2.15.0 those tests fail; 2.14 was not tried.
OLDEST, BELOW = "2.13", "2.14"


def refuse_shards(model: nn.Module, group: object) -> None:
    """Refuse a model that is not sharded along the first dimension over the ranks of the group, or by another torch."""
    if not OLDEST <= torch.__version__ < BELOW:
        raise MissingLibrary(
            f"sharded models need torch {OLDEST}, and this is torch {torch.__version__}: install that version, or train "
            "without fully_shard."
        )
    if group is False:
        raise Misuse(
            "the model is sharded over processes, and group=False says that this one trains alone: leave group unset."
        )
    if not isinstance(model, FSDPModule):
        raise Misuse(f"parts of the model are sharded or tensor-parallel, and the model itself is not sharded: {HOW}")
    members = dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            if parameter.requires_grad:
                raise Misuse(
                    f"parameter {name!r} is not sharded, and others are: {HOW} Only frozen parameters may be ignored_params."
                )
            continue
        if parameter.placements != (Shard(0),) or parameter.device_mesh.mesh.tolist() != members:
            raise Misuse(
                f"parameter {name!r} is placed as {parameter.placements} on the ranks "
                f"{parameter.device_mesh.mesh.tolist()}, and only shards of the first dimension over the ranks that train "
                f"together ({members}) are supported, without replication or tensor parallelism: {HOW}"
            )
    if any(group._use_post_forward_mesh for state in _states(model) for group in state._fsdp_param_groups):
        raise Misuse("fully_shard with a number for reshard_after_forward is not supported: take True or False.")
    if any(shard.offload_to_cpu for state in _states(model) for shard in _parameters_of(state)):
        raise Misuse("fully_shard with an offload_policy is not supported: leave the parameters on their devices.")


class Sharded:
    """The shards of a model, as the engine uses them (`clipless.gradients.shards.Shards`)."""

    def __init__(self, model: nn.Module, ranks: Alone | Ranks) -> None:
        assert isinstance(model, FSDPModule)
        self.root: Any = model
        self.whole = self.was_whole = False
        self._ranks, self._states = ranks, _states(model)
        self.root._get_fsdp_state()._lazy_init()
        self.divide()
        self._parameters: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        outer = _parameters_of(self.root._get_fsdp_state())
        self.outer = frozenset(names[id(shard.sharded_param)] for shard in outer if id(shard.sharded_param) in names)

    def attach(self) -> "Sharded":
        """From now on a block that cannot be gathered, because a rank is lost, is refused as any call to the others is."""
        for group in self._groups():
            for name in ("unshard", "wait_for_unshard"):
                vars(group)[name] = partial(self._gathered, getattr(group, name))
        return self

    def remove(self) -> None:
        for group in self._groups():
            for name in ("unshard", "wait_for_unshard"):
                vars(group).pop(name, None)

    def _gathered(self, gather: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._ranks.reaching("a block of the model"):
            return gather(*args, **kwargs)

    def _groups(self) -> list[Any]:
        return [group for state in self._states for group in state._fsdp_param_groups]

    def gather_if(self, wanted: bool) -> bool:
        """Gather the model on every rank if it is `wanted` on any. Returns whether it is whole now."""
        if not self.whole and self._ranks.any(wanted):
            self._gather()
        return self.whole

    def gather_again(self) -> None:
        """Gather the model again if it was whole in this batch, which is the same on all ranks."""
        if self.was_whole and not self.whole:
            self._gather()

    def _gather(self) -> None:
        self.whole = self.was_whole = True
        for state in self._states:
            for group in state._fsdp_param_groups:
                vars(group)["reshard"] = _stay_together
            for module in state._modules[:1]:
                module.unshard()

    def forget(self) -> None:
        """A new batch begins."""
        self.was_whole = False
        self.divide()

    def divide(self) -> None:
        """Keep only this rank's shards, and clear what an interrupted pass, or one without a backward pass, has left."""
        self.whole = False
        for group in self._groups():
            vars(group).pop("reshard", None)
        self.root.reset_iter_state()

    def together(self, what: str) -> AbstractContextManager[object]:
        return self._ranks.together(what)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's part of a parameter."""
        return tuple(self._parameters[name].to_local().shape)

    def places(self) -> list[int]:
        """Where this rank's part of each parameter begins, were all parameters laid end to end."""
        found, start = [], 0
        for parameter in self._parameters.values():
            rows, width = len(parameter), parameter.numel() // max(1, len(parameter))
            found.append(start + min(self._ranks.rank * _share(rows, self._ranks.size), rows) * width)
            start += parameter.numel()
        return found

    def scattered(self, sums: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of every sum, added up over the ranks: small sums together, large ones piece by piece, so that
        little is there besides the sum itself."""
        waiting: list[tuple[str, Tensor]] = []
        for name, total in sums:
            if waiting and (
                total.dtype != waiting[0][1].dtype or sum(t.nbytes for _, t in waiting) + total.nbytes > PIECE
            ):
                yield from self._sent(waiting)
                waiting.clear()
            waiting.append((name, total))
            del total
        if waiting:
            yield from self._sent(waiting)

    def _sent(self, sums: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        size = self._ranks.size
        widths = [_share(len(total), size) * (total.numel() // max(1, len(total))) for _, total in sums]
        parts = [[row.view(-1) for row in _by_rank(total, size)] for _, total in sums]
        own = sums[0][1].new_empty(sum(widths))
        most = max(1, PIECE // (size * own.element_size()))
        for first in range(0, len(own), most):
            piece = own.new_zeros(size, min(most, len(own) - first))
            start = -first
            for rows, width in zip(parts, widths, strict=True):
                for into, row in zip(piece, rows, strict=True):
                    _overlap(into, row, start)
                start += width
            own[first : first + piece.shape[1]] = self._ranks.scatter(piece)
        for part, (name, _) in zip(own.split(widths), sums, strict=True):
            shape = self.shape(name)
            yield name, part[: torch.Size(shape).numel()].view(shape)

    def placed(self, name: str, part: Tensor) -> Tensor:
        """A rank's part of a gradient as the DTensor that belongs to the parameter."""
        return _as_part(part, self._parameters[name])


def local_rows(whole: Tensor, like: DTensor) -> DTensor:
    """A whole tensor divided as the sharded one is."""
    rows = len(like.to_local())
    first = min(like.device_mesh.get_local_rank() * _share(len(whole), like.device_mesh.size()), len(whole))
    return _as_part(whole[first : first + rows].to(like.device, copy=True), like)


def _as_part(part: Tensor, like: DTensor) -> DTensor:
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def _by_rank(total: Tensor, size: int) -> list[Tensor]:
    """The rows of every rank; the last ones may have fewer, or none."""
    share = _share(len(total), size)
    return [total[min(rank * share, len(total)) : (rank + 1) * share] for rank in range(size)]


def _overlap(into: Tensor, row: Tensor, start: int) -> None:
    """Copy what of a row falls into a piece, if it begins at that place of it."""
    first, last = max(start, 0), min(start + len(row), len(into))
    if first < last:
        into[first:last] = row[first - start : last - start]


def _share(rows: int, size: int) -> int:
    """How many rows the first ranks hold."""
    return -(-rows // size)


def _stay_together() -> None:
    """In place of a group's `reshard` while the model is whole."""


def _states(model: nn.Module) -> list[Any]:
    """What FSDP2 keeps for each call of fully_shard."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found[id(state)] = state
    return list(found.values())


def _parameters_of(state: Any) -> list[Any]:
    return [shard for group in state._fsdp_param_groups for shard in group.fsdp_params]
