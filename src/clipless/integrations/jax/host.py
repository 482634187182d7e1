"""What is computed in main memory, between JAX and the library's own parts: the noise, and the policies' statistics."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from clipless.noise import NoiseSource
from clipless.thresholds import ThresholdPolicy
from clipless.thresholds.policy import State


def to_torch(array: Any) -> Tensor:
    """An array in memory of its own, in at least float32 if it has floating-point numbers."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = np.asarray(array).astype(jnp.promote_types(array.dtype, jnp.float32))
    return torch.from_numpy(np.array(array))


def to_jax(tensor: Tensor, dtype: Any) -> jax.Array:
    """A tensor as an array of that type."""
    return jnp.asarray(np.array(tensor.numpy())).astype(dtype)


def noised(
    source: NoiseSource, stream: str, step: int, tree: Any, stddevs: Sequence[float], divisor: float = 1.0
) -> Any:
    """A pytree of sums as it is released: (each leaf + noise of its standard deviation) / divisor, on the noise's grid.

    The same source, stream and step give the same noise, and the leaves use its numbers one after the other, as the tensors
    of a torch run do. Whoever calls this records the event first.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    released = source.release(stream, step, [to_torch(leaf) for leaf in leaves], stddevs, divisor)
    return structure.unflatten([to_jax(part, leaf.dtype) for part, leaf in zip(released, leaves, strict=True)])


def observed(policy: ThresholdPolicy, state: State, norms: Any) -> Tensor | None:
    """A policy's statistic of some records' norms [G,B]; None if it needs none. One record moves its length by at most 1."""
    return policy.observe(state, to_torch(norms))
