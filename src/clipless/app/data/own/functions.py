"""Data from a function of the user's own, `package.module:function`."""

import difflib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from clipless.app.data.dataset import Array, Data, make_data, make_targets, make_texts
from clipless.app.data.own.choice import OwnData
from clipless.app.importing import import_callable
from clipless.arguments import named
from clipless.errors import InvalidArgument, InvalidType

KEYS = ("train", "test", "task", "classes", "vocabulary")
TASKS = {name: name for name in ("classes", "numbers", "labels", "tokens")} | {"regression": "numbers"}
SHAPE = "Return {'train': (x, y), 'test': (x, y), 'task': 'classes', 'classes': 3}, or a clipless.app.data.Data."


def is_function(name: str) -> bool:
    """Whether a name has the form package.module:function.

    >>> is_function("mypackage.data:load"), is_function("C:/data.csv")
    (True, False)
    """
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def load_function(name: str, stated: OwnData) -> Data:
    """What the function returns, called without arguments: a `Data`, or a mapping with `train` and `test`, each a pair of
    arrays or tensors, and `task` and `classes` unless they are stated on the command line.

    The number of classes is never taken from the labels. Raises InvalidArgument or InvalidType with what to return.
    """
    stated.refuse_on(f"{name} is a function", allowed=("task", "classes"))
    found = import_callable(name, "data", "() -> {'train': (x, y), 'test': (x, y), ...}")()
    if isinstance(found, Data):
        return found
    if not isinstance(found, Mapping):
        raise InvalidType(f"{name} returned {type(found).__name__}. {SHAPE}")
    for key in found:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f": did you mean {near[0]!r}?" if near else "."  # the key itself may be that of a record
            raise InvalidArgument(f"{name} returned a key that is none of {', '.join(KEYS)}{hint} {SHAPE}")
    train, test = (_pair(name, key, found.get(key)) for key in ("train", "test"))
    names = stated.class_names()
    classes = found.get("classes") if names is None else len(names)
    task = stated.stated_task() or named("task", found.get("task", "classes"), TASKS)
    title = name.replace(":", ".")
    if task in ("classes", "tokens") and (isinstance(classes, bool) or not isinstance(classes, int) or classes < 2):
        raise InvalidArgument(f"{name} does not say how many classes there are, and labels are not inspected: {SHAPE}")
    if found.get("vocabulary") is not None:
        return make_texts(title, train, test, int(classes or 0), int(found["vocabulary"]), task)
    return make_data(title, train, test, classes) if task == "classes" else make_targets(title, train, test, task)


def _pair(name: str, key: str, value: Any) -> tuple[Array, Array]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidType(f"{name} returned no pair (x, y) as {key!r}. {SHAPE}")
    x, y = (part.numpy(force=True) if isinstance(part, torch.Tensor) else np.asarray(part) for part in value)
    return x, y
