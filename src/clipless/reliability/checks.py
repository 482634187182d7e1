"""Probabilities and labels as arrays, or the sentence that says what is wrong with them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from clipless.arrays import Floats
from clipless.errors import InvalidArgument, InvalidType

Labels = npt.NDArray[np.int64]
SUM_TOLERANCE = 0.01


def as_array(values: Any) -> npt.NDArray[Any]:
    """An array on the CPU, of a torch tensor too, which NumPy cannot read when it is bfloat16 or needs a gradient."""
    if getattr(values, "detach", None) is None:
        return np.asarray(values)
    found = values.detach().cpu()
    return np.asarray((found.double() if found.is_floating_point() else found).numpy())


def checked(probabilities: Any, labels: Any) -> tuple[Floats, Labels]:
    """Probabilities [N, K] in float64, two columns for [N], and labels [N] of 0 … K-1.

    Rows may miss a sum of 1 by the rounding of bfloat16 and are not rescaled.
    """
    return _probabilities(probabilities, labels), _labels(labels, probabilities)


def _probabilities(values: Any, labels: Any) -> Floats:
    found = as_array(values)
    if found.dtype.kind not in "fiub" or found.ndim not in (1, 2):
        raise InvalidType(f"probabilities must be numbers of shape [N, K] or [N], got {found.dtype} {found.shape}.")
    table = found.astype(np.float64)
    if table.shape[0] == 0:
        raise InvalidArgument("there are no predictions to judge: probabilities has no rows.")
    if not np.isfinite(table).all() or table.min() < 0 or table.max() > 1 + SUM_TOLERANCE:
        raise InvalidArgument("probabilities must lie in [0, 1]: pass logits through softmax (or sigmoid) first.")
    if table.ndim == 1:
        return np.stack([1 - table, table], 1).clip(0, 1)
    if table.shape[1] < 2:
        raise InvalidArgument("probabilities of one column: give [N] for the probability of class 1, or all K columns.")
    if np.abs(table.sum(1) - 1).max() > SUM_TOLERANCE:
        raise InvalidArgument("the rows of probabilities must sum to 1: pass logits through softmax first.")
    return table.clip(0, 1)


def _labels(values: Any, probabilities: Any) -> Labels:
    found, shape = as_array(values), as_array(probabilities).shape
    if found.ndim != 1 or found.shape[0] != shape[0]:
        raise InvalidArgument(f"labels must be one per row: {shape[0]} rows, labels of shape {found.shape}.")
    if found.dtype.kind not in "iub":
        raise InvalidType(f"labels must be whole numbers, got {found.dtype}: for one-hot labels take argmax(1).")
    classes = shape[1] if len(shape) == 2 else 2
    if found.min() < 0 or found.max() >= classes:
        raise InvalidArgument(
            f"labels must lie in 0 … {classes - 1}: correct them, or give the probabilities of all classes."
        )
    return found.astype(np.int64)
