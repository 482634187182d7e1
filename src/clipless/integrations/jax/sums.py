"""From per-example gradients, a pytree with a row per record in every leaf, to clipped sums: pure functions under jit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from clipless.clipping import Clipping, Rule, as_clipping, least_norm
from clipless.errors import InvalidArgument, InvalidType
from clipless.integrations.jax.rules import factors, form_of
from clipless.partition import Partition, partition

# The largest number of records that are summed in float32.
BLOCK = 2048
_TORCH = {"float32": torch.float32, "float64": torch.float64}


class ClippedPytree(NamedTuple):
    """The clipped gradients of a batch added up, in at least float32, and the norms [G,B]. Neither is private."""

    sums: Any
    norms: jax.Array


def per_example(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The gradients of `loss(params, *record)`, one number, for every record of a batch: `gradients(params, *batch)`.

    Each record is differentiated by itself, so no record can enter another's gradient. What `loss` needs beside the data,
    such as a random key for dropout, is given with a row per record.

    >>> square = per_example(lambda w, x: (w * x) ** 2)
    >>> square(jnp.array(1.0), jnp.array([1.0, 2.0])).tolist()
    [2.0, 8.0]
    """

    def gradients(params: Any, *batch: Any) -> Any:
        rows = (None, *(0 for _ in batch))
        return jax.vmap(jax.grad(loss), in_axes=rows)(params, *batch)

    return jax.jit(gradients)


@dataclass(frozen=True)
class Parameters:
    """The names, shapes and types of the leaves of a pytree of parameters, in its order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    structure: Any

    @classmethod
    def of(cls, params: Any) -> "Parameters":
        """Raises unless all leaves are arrays of floating-point numbers."""
        found, structure = jax.tree_util.tree_flatten_with_path(params)
        names = tuple(jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path, _ in found)
        for name, (_, leaf) in zip(names, found, strict=True):
            if not isinstance(leaf, jax.Array | np.ndarray) or not jnp.issubdtype(leaf.dtype, jnp.floating):
                kind = getattr(leaf, "dtype", type(leaf).__name__)
                raise InvalidType(
                    f"parameter {name!r} is {kind}: only arrays of real floating-point numbers are trained. Give "
                    "make_private the part of the tree that learns."
                )
        if not names:
            raise InvalidArgument("there is no parameter to train: give the pytree that the gradients will have.")
        return cls(names, tuple(leaf.shape for _, leaf in found), tuple(leaf.dtype for _, leaf in found), structure)

    def rows(self, gradients: Any) -> list[jax.Array]:
        """The leaves of per-example gradients; raises unless they fit these parameters and have the same number of rows."""
        found, structure = jax.tree_util.tree_flatten(gradients)
        if structure != self.structure:
            raise InvalidType(
                f"the gradients have another structure than the parameters: {structure} instead of {self.structure}. Give "
                "the gradients of all parameters that make_private got, with no optax.masked around it."
            )
        for name, shape, leaf in zip(self.names, self.shapes, found, strict=True):
            if tuple(leaf.shape[1:]) != tuple(shape) or leaf.ndim != len(shape) + 1 or len(leaf) != len(found[0]):
                raise InvalidArgument(
                    f"the gradient of {name!r} does not have one row per record, the shape (rows, "
                    f"{', '.join(map(str, shape))}): compute them with clipless.integrations.jax.per_example(loss)."
                )
        return found

    def grouped(self, groups: Partition) -> tuple[int, ...]:
        """The number of each leaf's group."""
        return tuple(groups.group_of[name] for name in self.names)


def clipped_sum(gradients: Any, clipping: str | Clipping = "auto-s", thresholds: Any = None) -> ClippedPytree:
    """The sum of each record's clipped gradient: no noise, no division, nothing private about it.

    `gradients` has a row per record in every leaf. Without `thresholds`, [G,1], those that the clipping starts with.

    >>> clipped_sum({"w": jnp.array([[0.0, 4.0], [0.5, 0.0]])}, "abadi").sums["w"].round(5).tolist()
    [0.5, 1.0]
    """
    how = as_clipping(clipping)
    found = jax.tree_util.tree_map(lambda leaf: np.empty(leaf.shape[1:], leaf.dtype), gradients)
    parameters = Parameters.of(found)
    leaves, groups = parameters.rows(gradients), partition(how.groups, parameters.names)
    start = how.start(len(groups)).numpy() if thresholds is None else np.asarray(thresholds)
    whole = np.zeros(len(leaves[0]), bool)
    sums, norms = clip_rows(leaves, start, len(leaves[0]), whole, how.rule, parameters.grouped(groups))
    return ClippedPytree(parameters.structure.unflatten(sums), norms)


def clip_rows(
    leaves: Sequence[jax.Array],
    thresholds: Any,
    records: int,
    broken: Any,
    rule: Rule,
    group_of: tuple[int, ...],
) -> tuple[list[jax.Array], jax.Array]:
    """Each leaf's clipped sum over the first `records` rows, and the norms of all rows, [G,B], infinite in the others.

    A record whose norm in a group is not finite adds nothing to that group; if its data are `broken` [B], to none.
    Squares are added up in float64, so that many of them do not make a norm too small.
    """
    form_of(rule)
    with jax.enable_x64(True):
        return _compiled(tuple(leaves), thresholds, records, broken, rule, group_of)


def _clip_rows(
    leaves: tuple[jax.Array, ...],
    thresholds: jax.Array,
    records: jax.Array,
    broken: jax.Array,
    rule: Rule,
    group_of: tuple[int, ...],
) -> tuple[list[jax.Array], jax.Array]:
    rows = len(leaves[0])
    dtype = reduce(jnp.promote_types, (leaf.dtype for leaf in leaves), jnp.float32)
    squares = [jnp.zeros(rows, jnp.float64) for _ in range(len(thresholds))]
    for group, leaf in zip(group_of, leaves, strict=True):
        squares[group] += jnp.square(leaf.astype(jnp.float64)).reshape(rows, -1).sum(1)
    norms = jnp.sqrt(jnp.stack(squares).astype(dtype))
    norms = jnp.where(jnp.isfinite(norms), norms, jnp.inf)
    norms = jnp.where(norms > least_norm(_TORCH[np.dtype(dtype).name]), norms, 0.0)
    unusable = (jnp.arange(rows) >= records) | (broken & jnp.isinf(norms).any(0))
    norms = jnp.where(unusable, jnp.inf, norms).astype(dtype)
    share = jnp.where(norms > 0, factors(rule, norms, thresholds.astype(dtype)), 0.0)
    sums = []
    for group, leaf in zip(group_of, leaves, strict=True):
        wide = jnp.promote_types(leaf.dtype, jnp.float32)
        used = jnp.isfinite(norms[group]).reshape(rows, *([1] * (leaf.ndim - 1)))
        kept = jnp.where(used, leaf, 0).astype(wide)  # 0 times NaN is NaN
        sums.append(jnp.einsum("b,b...->...", share[group].astype(wide), kept, precision=jax.lax.Precision.HIGHEST))
    return sums, norms


_compiled = jax.jit(_clip_rows, static_argnums=(4, 5))
