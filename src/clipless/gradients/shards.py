"""A model whose parameters are divided over processes, as the engine sees it."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from clipless.errors import Misuse


class Shards(Protocol):
    """The parameters of `root`, divided over processes. Those of a module are gathered while it runs.

    All processes call the same methods in the same order. While the model is `whole` on all of them, a process may run it
    any number of times without communication. `outer` are the names of the parameters that stay gathered during the whole
    call of `root`.
    """

    @property
    def root(self) -> nn.Module: ...

    @property
    def whole(self) -> bool: ...

    @property
    def outer(self) -> Collection[str]: ...

    def gather_if(self, wanted: bool) -> bool:
        """Gather the model on every process if it is `wanted` on any. Returns whether it is whole now."""

    def gather_again(self) -> None:
        """Gather the model again, to compare what was checked, if it was whole in this batch."""

    def divide(self) -> None:
        """Keep only this process's shards."""

    def forget(self) -> None:
        """Keep only this process's shards, and clear what an interrupted pass has left: a new batch begins."""

    def together(self, what: str) -> AbstractContextManager[object]:
        """What is done inside succeeds on every process, or raises on every one."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of this process's part of a parameter."""

    def scattered(self, sums: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """This process's part of every sum, added up over the processes. All have the same names in the same order."""


def own_rows(whole: Tensor, like: Tensor) -> Tensor:
    """The rows of a whole tensor that this process holds of `like`; all rows if that is not sharded."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return whole
    rows = -(-len(whole) // mesh.size())
    first: int = mesh.get_local_rank() * rows
    return whole[first : first + rows]


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model of which this process holds only a part."""
    name = sharded_parameter(model)
    if name is not None:
        raise Misuse(
            f"parameter {name!r} is sharded over processes (DTensor): check the model, and compute clipped sums of it, "
            "before fully_shard."
        )


def sharded_parameter(model: nn.Module) -> str | None:
    """The name of the first sharded parameter; None if there is none."""
    names = (name for name, parameter in model.named_parameters() if type(parameter).__name__ == "DTensor")
    return next(names, None)
