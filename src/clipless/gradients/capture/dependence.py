"""Which tensors of a probe are computed from its records, and where the records decide which rows there are, in which order.

Shapes do not tell that: an expert may by chance get as many rows in two probes, or as many as there are records.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clipless.gradients.capture.transforms import unwrapped
from clipless.torch_internals import StorageWeakRef, WeakIdRef, pytree


class RecordDependence(TorchFunctionMode):
    """Follows the records through the operations of a probe: memory depends on them if anything in it was computed from
    them."""

    def __init__(self, records: Iterable[Tensor]) -> None:
        super().__init__()
        self._dependent = {_memory(tensor) for tensor in records}
        self._reordered: set[object] = set()

    def computed(self, tensor: Tensor) -> bool:
        """Whether anything in the tensor's memory was computed from the records."""
        return _memory(tensor) in self._dependent

    def depends(self, values: Any) -> bool:
        """Whether any tensor of one dimension or more in the structure depends on the records."""
        return any(leaf.dim() > 0 and _memory(leaf) in self._dependent for leaf in _tensors(values))

    def reordered(self, values: Any) -> bool:
        """Whether the records chose the rows of any tensor in the structure, or their order."""
        return any(leaf.dim() > 0 and _memory(leaf) in self._reordered for leaf in _tensors(values))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = {_memory(leaf) for leaf in _tensors((args, kwargs))}
        if func in _VALUES_UNUSED or inputs.isdisjoint(self._dependent):
            return result
        written = {_memory(leaf) for leaf in _tensors(args[:1] if result is None else result)}
        self._dependent |= written
        rows_from = {_memory(leaf) for leaf in _tensors(args[:1])} if func in _WRITES else inputs
        if not rows_from.isdisjoint(self._reordered) or self._chooses_rows(func, args, kwargs):
            self._reordered |= written
        return result

    def _chooses_rows(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the operation takes slices along the first dimension of a tensor by an index, both of which depend on the
        records."""
        if func is Tensor.__getitem__:
            tensor, index = args
            first = index[0] if isinstance(index, tuple) and index else index
        elif func in _TAKES:
            given = {**dict(zip(("input", "dim", "index"), args, strict=False)), **kwargs}
            tensor, first = given["input"], given["index"] if given["dim"] in (0, -given["input"].dim()) else None
        else:
            return False
        return isinstance(first, Tensor) and self.depends(first) and self.depends(tensor)


# Operations whose results have the shapes and types of their operands, but nothing of what is in them.
_VALUES_UNUSED = {
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
}
# Operations that take slices along a dimension by an index: (input, dim, index). Operations that write slices into a tensor,
# whose own rows stay where they are.
_TAKES = {torch.index_select, Tensor.index_select, torch.gather, Tensor.gather}
_WRITES = {Tensor.__setitem__} | {
    getattr(owner, name)
    for stem in ("index_add", "index_copy", "index_put", "index_reduce", "scatter", "scatter_add", "scatter_reduce")
    for owner, name in ((torch, stem), (Tensor, stem), (Tensor, f"{stem}_"))
}


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> object:
    """A key for the memory that a tensor is a view of; for the tensor itself if it has none of its own."""
    inner = unwrapped(tensor)
    try:
        return StorageWeakRef(inner.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return WeakIdRef(inner)
