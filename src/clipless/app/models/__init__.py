"""Models for the command line and the experiments, by name or by the import path of a factory.

>>> sum(p.numel() for p in build("cnn", (1, 28, 28), 10).parameters())
26010
"""

import importlib
from collections.abc import Callable

from torch import nn

from clipless.app.models.networks import cnn, linear, mlp
from clipless.arguments import unknown_name
from clipless.errors import InvalidArgument, InvalidType

__all__ = ["MODELS", "Factory", "build"]

Factory = Callable[[tuple[int, ...], int], nn.Module]

MODELS: dict[str, Factory] = {"linear": linear, "mlp": mlp, "cnn": cnn}


def build(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A fresh model that maps `[batch, *shape]` to `[batch, classes]` logits, drawn from torch's generator.

    `name` is a key of `MODELS` or `"package.module:factory"`, a callable `(shape, classes) -> nn.Module`.
    Raises InvalidArgument for an unknown name, InvalidType for a factory that does not return a module.
    """
    factory = _import_factory(name) if ":" in name else MODELS.get(name)
    if factory is None:
        raise unknown_name("model", name, [*MODELS, "package.module:factory"])
    model = factory(shape, classes)
    if not isinstance(model, nn.Module):
        raise InvalidType(f"{name!r} returned {type(model).__name__}. Return an nn.Module from (shape, classes).")
    return model


def _import_factory(path: str) -> Factory:
    module, _, attribute = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgument(
            f"cannot import the model {path!r} ({error}). Name a callable (shape, classes) -> nn.Module "
            "as 'package.module:factory'."
        ) from error
    if not callable(factory):
        raise InvalidType(f"{path!r} is {type(factory).__name__}. Name a callable (shape, classes) -> nn.Module.")
    return factory
