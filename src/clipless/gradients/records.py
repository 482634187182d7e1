"""Where the records lie in the inputs of a model, and inputs with other records in their place."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, count
from typing import Any

import torch
from torch import Tensor, nn

from clipless.gradients.trees import shapes_of
from clipless.torch_internals import pytree

# For each tensor of an input that carries records, by its number: the dimension along which they lie.
Reading = dict[int, int]
# Exceptions that a model may raise on inputs that it does not expect.
TROUBLES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, NotImplementedError)


def needed_records(values: Any, reading: Reading) -> list[int]:
    """Records that a probe must contain to take the same path as the batch: for every mask, one with a zero and one with a
    one."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    found: list[int] = []
    for k, dim in reading.items():
        if mask_values(tensors[k]) == (0, 1):
            rows = tensors[k].movedim(dim, 0).reshape(tensors[k].shape[dim], -1).bool()
            for has in (~rows.all(1), rows.any(1)):
                if not bool(has[found].any()):
                    found.append(int(has.int().argmax()))
    return sorted(found)


def unused_sizes(values: Any, module: nn.Module, records: int, least: int = 2) -> tuple[int, int]:
    """Two small numbers of records that are no other size in the inputs or the parameters."""
    taken = {size for shape in shapes_of(values) for size in shape if size != records or shape.count(size) > 1}
    taken |= {size for parameter in module.parameters() for size in parameter.shape}
    free = (number for number in count(max(least, 2)) if number not in taken)
    return next(free), next(free)


def unused_primes(values: Any, module: nn.Module, records: int, least: int = 2) -> tuple[int, int]:
    """Two primes that divide no other size in the inputs, parameters or buffers: a multiple of one of them is a number of
    records times something."""
    taken = {size for shape in shapes_of(values) for size in shape if size != records or shape.count(size) > 1}
    taken |= {size for tensor in (*module.parameters(), *module.buffers()) for size in tensor.shape}
    primes = (n for n in count(max(least, 7)) if all(n % k for k in range(2, n)))
    free = (n for n in primes if all(size % n for size in taken if size))
    return next(free), next(free)


def mask_values(tensor: Tensor) -> tuple[int, int] | None:
    """The smallest and the largest number of a mask of zeros and ones; None for any other tensor."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() == 0:
        return None
    least, most = map(int, tensor.aminmax())
    return (least, most) if least >= 0 and most <= 1 else None


def written(shape: torch.Size, records: int) -> str:
    """A shape for a message, with B in place of the number of records, which is not public."""
    return "(" + ", ".join("B" if size == records else str(size) for size in shape) + ")"


def readings(values: Any, records: int) -> Iterator[Reading]:
    """Which tensors of the model's input may carry records, and along which dimension, the likeliest reading first.

    The first reading has every tensor with a dimension of that size (the first such dimension); the others have fewer,
    since a size may be a coincidence.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    found = {k: tensor.shape.index(records) for k, tensor in enumerate(tensors) if records in tensor.shape}
    for number in range(len(found), 0, -1):
        for chosen in combinations(found, number):
            yield {k: found[k] for k in chosen}


def is_square(values: Any, records: int) -> bool:
    """Whether the second dimension of an input may be that of the records, as in time-major sequences with as many positions
    as records. The last dimension of a floating-point tensor holds features and does not count."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    return any(t.shape[:2] == (records, records) and t.dim() > 1 + t.is_floating_point() for t in tensors)


def resized(values: Any, reading: Reading, target: int, needed: Sequence[int] = ()) -> Any:
    """The structure with `target` of its records, dropped or repeated in order; the `needed` ones are included."""

    def resize(tensor: Tensor, dim: int) -> Tensor:
        rows = _chosen(tensor.shape[dim], target, needed)
        return tensor.index_select(dim, torch.tensor(rows, dtype=torch.long, device=tensor.device))

    return with_records(values, reading, resize)


def _chosen(records: int, target: int, needed: Sequence[int]) -> list[int]:
    """
    >>> _chosen(6, 3, []), _chosen(6, 3, [3, 5]), _chosen(2, 3, [1])
    ([0, 2, 4], [0, 3, 5], [0, 0, 1])
    """
    even = [k * records // target for k in range(target)]
    missing = [row for row in needed if row not in even]
    spare = [row for row in even if row not in needed]
    return sorted([row for row in even if row in needed] + missing + spare[: max(len(spare) - len(missing), 0)])


def with_records(values: Any, reading: Reading, change: Callable[[Tensor, int], Tensor]) -> Any:
    """The structure with `change(tensor, dim)` in place of the tensors that carry records."""
    numbers = count()

    def changed(leaf: Any) -> Any:
        dim = reading.get(next(numbers)) if isinstance(leaf, Tensor) else None
        return leaf if dim is None else change(leaf, dim)

    return pytree.tree_map(changed, values)


def broken_records(tensor: Tensor, dim: int | None, records: int, masks: bool) -> Tensor | None:
    """Which records have data that are not finite, [b]; None if none, or if the tensor holds no data. With `masks`, -inf
    counts as finite."""
    data = tensor.is_floating_point() and not tensor.requires_grad and tensor.numel() > 0
    if not data or dim is None or tensor.shape[dim] != records:
        return None
    rows = tensor.movedim(dim, 0).reshape(records, -1)
    if bool(torch.linalg.vector_norm(rows, dim=1).isfinite().all()):
        return None  # the usual case; the maximum below takes longer, and does not overflow
    largest = rows.amax(1) if masks else torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    return ~(largest < torch.inf)


def selected(values: Any, reading: Reading, rows: Tensor) -> Any:
    """The structure with only these records."""
    numbers = count()

    def select(leaf: Any) -> Any:
        dim = reading.get(next(numbers)) if isinstance(leaf, Tensor) else None
        return leaf if dim is None else leaf.index_select(dim, rows.to(leaf.device))

    return pytree.tree_map(select, values)
