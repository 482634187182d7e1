"""Functions of the user's own, by the name `package.module:function`."""

import importlib
from collections.abc import Callable
from typing import Any

from clipless.arguments import unknown_name
from clipless.errors import InvalidArgument, InvalidType


def import_callable(path: str, kind: str, form: str) -> Callable[..., Any]:
    """The callable of that name, for example `"mypackage.models:build"`. `form` says what it takes and returns.

    Raises InvalidArgument, with the nearest name in the module, if it cannot be imported; InvalidType if it is not callable.

    >>> import_callable("math:sqrt", "loss", "(output, y) -> losses")(4.0)
    2.0
    """
    module, _, attribute = path.partition(":")
    try:
        found = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        why = error if isinstance(error, ImportError) else type(error).__name__  # what it says may quote a record
        raise InvalidArgument(
            f"cannot import the {kind} {path!r} ({why}). Name a callable {form} as 'package.module:function'; modules of "
            "the current folder are found."
        ) from error
    try:
        value = getattr(found, attribute)
    except AttributeError:
        public = [name for name, one in vars(found).items() if callable(one) and not name.startswith("_")]
        unknown = unknown_name(f"name in the module {module}", attribute, public[:20])
        raise InvalidArgument(f"cannot import the {kind} {path!r}: {unknown}") from None
    if not callable(value):
        raise InvalidType(f"{path!r} is {type(value).__name__}. Name a callable {form}.")
    return value
