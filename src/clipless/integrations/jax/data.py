"""Poisson batches of arrays, padded to few different shapes, so that jit compiles once."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import Tensor

from clipless.errors import InvalidArgument, InvalidType
from clipless.sampling.loader import BatchListener, Parts, PoissonSampler, PrivateLoader, Split, part_size


def usual_rows(expected: int, size: int) -> int:
    """The number of rows to pad whole batches to: four standard deviations above the expected batch, a multiple of 8.

    >>> usual_rows(256, 60_000), usual_rows(10, 10)
    (320, 10)
    """
    spread = math.sqrt(expected * (1 - expected / size))
    return min(size, -(-math.ceil(expected + 4 * spread) // 8) * 8)


def padded_size(records: int, rows: int) -> int:
    """The least multiple of `rows` that has room for all records: no record is ever left out.

    >>> padded_size(0, 64), padded_size(64, 64), padded_size(65, 64)
    (64, 64, 128)
    """
    return max(1, -(-records // rows)) * rows


class ArrayFetcher:
    """Indexes a pytree of arrays in main memory, which have `size` records. Every batch has a multiple of `rows` rows: its
    records, then zeros.

    `finite` says of the last batch fetched which rows have only finite numbers.
    """

    def __init__(self, arrays: Any, rows: int, size: int) -> None:
        self.arrays, self.rows, self.size = arrays, rows, size
        self.dataset: Any = arrays
        self.collate_fn: Any = None
        self.sizes: Tensor | None = None
        self.finite = np.ones(0, bool)

    def __call__(self, parts: Iterator[Tensor], first_draw: int) -> Iterator[Any]:
        return map(self.once, parts)

    def once(self, part: Tensor) -> Any:
        """The records of these numbers, padded."""
        chosen, size = part.numpy(), padded_size(len(part), self.rows)
        self.finite = np.ones(size, bool)
        return jax.tree_util.tree_map(lambda array: self._padded(array[chosen], size), self.arrays)

    def empty(self) -> Any:
        """A batch without records: padding alone."""
        self.finite = np.ones(self.rows, bool)
        return jax.tree_util.tree_map(lambda array: self._padded(array[:0], self.rows), self.arrays)

    @property
    def mixes(self) -> bool:
        """False: records are indexed and not collated."""
        return False

    def samples(self, part: Tensor, together: bool = False) -> None:
        """None: records are indexed and not collated."""

    def dims(self, part: Tensor) -> None:
        """None: no check asks for it."""

    def _padded(self, chosen: Any, size: int) -> Any:
        padded = np.zeros((size, *chosen.shape[1:]), chosen.dtype)
        padded[: len(chosen)] = chosen
        if jnp.issubdtype(chosen.dtype, jnp.floating):
            self.finite[: len(chosen)] &= np.isfinite(chosen).all(axis=tuple(range(1, chosen.ndim)))
        return padded


class ArrayLoader(PrivateLoader):
    """Poisson batches as pytrees of padded arrays; `microbatches(n)` gives parts of exactly n rows."""

    def __init__(
        self,
        fetch: ArrayFetcher,
        sampler: PoissonSampler,
        steps_per_pass: int,
        listener: BatchListener,
        expected_batch: int,
    ) -> None:
        super().__init__(fetch, sampler, steps_per_pass, listener, expected_batch)
        self._arrays, self._usual = fetch, fetch.rows

    def _batches(self, steps: int, split: Split) -> Iterator[Parts]:
        self._arrays.rows = part_size(split) or self._usual
        return super()._batches(steps, split)

    def _again(self, split: Split) -> Parts:
        self._arrays.rows = part_size(split) or self._usual
        return super()._again(split)


def in_memory(data: Any) -> tuple[Any, int]:
    """The pytree with its arrays in main memory, and the number of records; raises unless all have a row per record."""
    leaves = jax.tree_util.tree_leaves(data)
    if not leaves or not all(isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim for leaf in leaves):
        raise InvalidType(
            "data must be a pytree of arrays with a row per record, such as (x, y) or {'x': x, 'y': y}, got "
            f"{type(data).__name__}: convert it with numpy first."
        )
    counts = {len(leaf) for leaf in leaves}
    if len(counts) > 1:
        raise InvalidArgument("the arrays have different numbers of rows: one row is one record.")
    (size,) = counts
    if not size:
        raise InvalidArgument("the data set is empty: there is nothing to train on.")
    return jax.tree_util.tree_map(np.asarray, data), size
