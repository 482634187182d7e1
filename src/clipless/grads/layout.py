"""Where the records are: which inputs of each module carry one row per record.

A size that equals the number of records may be a coincidence (a table of 32 positions, a batch of 32), and reading
positions as records would bound the wrong thing. So the first batch is accompanied by a second forward pass with another
number of records, without gradients and without touching the random state: what changes its shape carries records.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from clipless.errors import UnsupportedModule

Shapes = tuple[torch.Size, ...]
Dims = tuple[int | None, ...]


class Place(NamedTuple):
    """The inputs or outputs of one call of a module in a forward pass."""

    name: str
    call: int
    side: str = "input"


class Layout:
    """What has been learned of the tensors at each place: the inputs or the outputs of a numbered call of a module."""

    def __init__(self) -> None:
        self.entries: set[str] = set()
        self._probed: dict[Place, Shapes] = {}
        self._dims: dict[Place, Dims] = {}

    def forget(self) -> None:
        """Learn anew: a pass was refused, and what it showed may not hold for others."""
        self.entries.clear()
        self._probed.clear()
        self._dims.clear()

    def note(self, place: Place, shapes: Shapes) -> None:
        """Remember the shapes that the probe saw."""
        self._probed[place] = shapes

    def dims(self, place: Place, shapes: Shapes, records: int) -> Dims:
        """For each tensor at the place the dimension along which its records lie, None if it carries none."""
        known = self._dims.get(place)
        if known is None or len(known) != len(shapes):
            probed = self._probed.get(place)
            if probed is None or len(probed) != len(shapes):
                return tuple(0 if len(shape) > 0 and shape[0] == records else None for shape in shapes)
            pairs = zip(shapes, probed, strict=True)
            known = self._dims[place] = tuple(_changed_dim(place, now, then, records) for now, then in pairs)
        for shape, dim in zip(shapes, known, strict=True):
            if dim is not None and (dim >= len(shape) or shape[dim] != records):
                raise _rows_are_not_records(place, shape, records)
        return known


def _changed_dim(place: Place, now: torch.Size, then: torch.Size, records: int) -> int | None:
    """The one dimension in which a tensor's shape differs between two passes of different numbers of records."""
    if now == then:
        return None
    if len(now) == len(then):
        changed = [dim for dim in range(len(now)) if now[dim] != then[dim]]
        if len(changed) == 1 and now[changed[0]] == records:
            return changed[0]
    raise _rows_are_not_records(place, now, records)


def _rows_are_not_records(place: Place, shape: torch.Size, records: int) -> UnsupportedModule:
    return UnsupportedModule(
        f"module {place.name!r} has an {place.side} of shape {written(shape, records)}, and its rows are not the records "
        "of a batch of B. clipless needs a dimension of their own for the records: do not flatten them together with positions, "
        "and use other data under torch.no_grad()."
    )


def written(shape: torch.Size, records: int) -> str:
    """A shape for a message, with B where the size is that of the batch, which is nobody's business."""
    return "(" + ", ".join("B" if size == records else str(size) for size in shape) + ")"


def shapes_of(values: Any) -> Shapes:
    """Shapes of all tensors in a structure, in a fixed order."""
    return tuple(leaf.shape for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def resized(values: Any, records: int, target: int) -> Any:
    """The structure with every tensor of `records` rows cut or repeated to `target` rows."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != records:
            return leaf
        if records == 0:
            return leaf.new_zeros(target, *leaf.shape[1:])
        return leaf[torch.arange(target, device=leaf.device) % records]

    return pytree.tree_map(resize, values)


def probe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], records: int) -> bool:
    """Run the module on another number of records; False if it cannot. The tape's hooks note the shapes."""
    target = 3 if records == 2 else 2
    args, kwargs = resized((args, kwargs), records, target)
    with torch.no_grad(), random_state_kept(module):
        try:
            module(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            return False
    return True


@contextmanager
def random_state_kept(module: nn.Module) -> Iterator[None]:
    """Whatever is drawn inside, torch's generators are left as they were."""
    with torch.random.fork_rng(devices=_cuda_devices(module)):
        yield


def random_state(module: nn.Module) -> list[Tensor]:
    """The states of the generators that the module may draw from."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in _cuda_devices(module))]


def _cuda_devices(module: nn.Module) -> list[torch.device]:
    return list({parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"})
