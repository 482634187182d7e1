"""The type of all data sets, and the checks that every source goes through."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from clipless.errors import InvalidArgument

Array = NDArray[Any]


@dataclass(frozen=True)
class Data:
    """Records to train on (private) and to test on (not covered by any guarantee).

    Both data sets yield `(x, y)`: `x` of `shape`, float32, or int64 tokens below `vocabulary` if there is one. What `y` is
    depends on the `task`: "classes", an int64 in `range(classes)`; "numbers", float32 of (classes,); "labels", zeros and
    ones of (classes,); "tokens", the int64 token after each of `x`, -100 where it does not count. A model puts out
    `classes` numbers for each record, or for each token. `columns` says how a table of the user's own became numbers, and
    `notes` what they should know about it.
    """

    name: str
    train: TensorDataset
    test: TensorDataset
    classes: int
    shape: tuple[int, ...]
    task: str = "classes"
    vocabulary: int | None = None
    columns: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


def make_data(name: str, train: tuple[Array, Array], test: tuple[Array, Array], classes: int | None = None) -> Data:
    """Checked tensors from arrays of features and labels; `classes` defaults to what the training labels span.

    Raises InvalidArgument when a part is empty, features are not finite numbers, labels are not integers in
    `range(classes)`, or the shapes of features, labels, training and test part do not match.
    """
    x_train, y_train = _records(name, "training", *train)
    x_test, y_test = _records(name, "test", *test)
    if x_train.shape[1:] != x_test.shape[1:]:
        raise InvalidArgument(
            f"{name}: training records have shape {tuple(x_train.shape[1:])}, test records {tuple(x_test.shape[1:])}. "
            "Give both the same features."
        )
    known = "the stated classes" if classes is not None else "the classes of the training labels"
    classes = span(name, y_train) if classes is None else classes
    for part, labels in (("training", y_train), ("test", y_test)):
        if int(labels.max()) >= classes:
            raise InvalidArgument(
                f"{name}: a {part} label is out of range: it is none of {known}. Correct the labels, or remove such records."
            )
    shape = tuple(x_train.shape[1:])
    return Data(name, TensorDataset(x_train, y_train), TensorDataset(x_test, y_test), classes, shape)


def span(name: str, labels: Array | torch.Tensor) -> int:
    """The number of classes of labels 0, 1, 2, ...; raises if most of them could not occur."""
    classes = int(labels.max()) + 1
    if classes < 2:
        raise InvalidArgument(f"{name}: the labels name one class. A classifier needs at least two classes.")
    if classes > len(labels):
        raise InvalidArgument(
            f"{name}: a label is out of range for so few records. Number the classes 0, 1, 2, ... without gaps."
        )
    return classes


def integer_labels(name: str, labels: Array) -> Array:
    """Labels as int64. Raises InvalidArgument for anything but a vector of whole numbers that are not negative."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise InvalidArgument(f"{name}: labels have shape {labels.shape}. Give one class number per record.")
    if labels.dtype.kind not in "iuf" or not np.array_equal(labels, np.floor(labels)):
        raise InvalidArgument(f"{name}: labels are not integers. Number the classes 0, 1, 2, ...")
    if labels.size and labels.min() < 0:
        raise InvalidArgument(f"{name}: a label is negative. Number the classes 0, 1, 2, ...")
    if labels.size and labels.max() > np.iinfo(np.int32).max:
        raise InvalidArgument(f"{name}: a label is out of range. Number the classes 0, 1, 2, ...")
    return labels.astype(np.int64)


def _records(name: str, part: str, features: Array, labels: Array) -> tuple[torch.Tensor, torch.Tensor]:
    if features.dtype.kind not in "biuf":
        raise InvalidArgument(f"{name}: {part} features are not of a numeric type. Encode them as numbers.")
    if len(features) == 0:
        raise InvalidArgument(f"{name}: the {part} part is empty. Give it at least one record.")
    if features.ndim < 2 or 0 in features.shape:
        raise InvalidArgument(f"{name}: {part} features have shape {features.shape}. Give every record a feature.")
    labels = integer_labels(name, labels)
    if len(features) != len(labels):
        raise InvalidArgument(
            f"{name}: {len(features)} {part} records and {len(labels)} labels. Give every record one label."
        )
    x = torch.from_numpy(features.astype(np.float32))
    if not x.isfinite().all():
        raise InvalidArgument(f"{name}: {part} features hold NaN, infinity or values beyond float32. Repair them.")
    return x, torch.from_numpy(labels)


def make_texts(
    name: str,
    train: tuple[Array, Array],
    test: tuple[Array, Array],
    classes: int,
    vocabulary: int,
    task: str = "classes",
) -> Data:
    """Data of tokens, int64 [records, length] below `vocabulary`, and the targets of the task."""
    parts = []
    for part, (tokens, targets) in (("training", train), ("test", test)):
        if len(tokens) == 0:
            raise InvalidArgument(f"{name}: the {part} part is empty. Give it at least one record.")
        if task == "classes" and not (targets.min() >= 0 and targets.max() < classes):
            raise InvalidArgument(f"{name}: a {part} label is outside 0 to {classes - 1}. Correct it.")
        kind = np.float32 if task in ("numbers", "labels") else np.int64
        parts.append(TensorDataset(torch.from_numpy(tokens), torch.from_numpy(targets.astype(kind))))
    return Data(name, parts[0], parts[1], classes, tuple(train[0].shape[1:]), task, vocabulary)


def make_targets(name: str, train: tuple[Array, Array], test: tuple[Array, Array], task: str) -> Data:
    """Data of float32 features with float32 targets [records, outputs], for the tasks "numbers" and "labels"."""
    parts = []
    for part, (features, targets) in (("training", train), ("test", test)):
        arrays = [torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)) for array in (features, targets)]
        if len(features) == 0 or len(features) != len(targets):
            raise InvalidArgument(f"{name}: {len(features)} {part} records and {len(targets)} targets.")
        if not all(bool(array.isfinite().all()) for array in arrays):
            raise InvalidArgument(f"{name}: the {part} part holds NaN, infinity or values beyond float32. Repair it.")
        parts.append(TensorDataset(*arrays))
    return Data(name, parts[0], parts[1], int(train[1].shape[1]), tuple(train[0].shape[1:]), task)
