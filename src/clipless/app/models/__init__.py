"""Models for the command line and the experiments, by name or by the import path of a factory.

>>> sum(p.numel() for p in build("cnn", (1, 28, 28), 10).parameters())
26010
"""

from collections.abc import Callable

from torch import nn

from clipless.app.importing import import_callable
from clipless.app.models.networks import cnn, linear, mlp
from clipless.app.models.papers import cifar_cnn, cnn_relu, dc_cnn, global_mlp, linear_from_zero, resnet8_gn
from clipless.app.models.texts import bag, decoder, encoder, lstm
from clipless.arguments import unknown_name
from clipless.errors import InvalidArgument, InvalidType

__all__ = ["MODELS", "TEXT_MODELS", "Factory", "build"]

Factory = Callable[[tuple[int, ...], int], nn.Module]

FORM = "(shape, classes) -> nn.Module"

TextFactory = Callable[[tuple[int, ...], int, int], nn.Module]

MODELS: dict[str, Factory] = {
    "linear": linear,
    "linear-from-zero": linear_from_zero,
    "mlp": mlp,
    "global-mlp": global_mlp,
    "cnn": cnn,
    "cnn-relu": cnn_relu,
    "dc-cnn": dc_cnn,
    "cifar-cnn": cifar_cnn,
    "resnet8-gn": resnet8_gn,
}
TEXT_MODELS: dict[str, TextFactory] = {"bag": bag, "lstm": lstm, "encoder": encoder, "decoder": decoder}


def build(name: str, shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> nn.Module:
    """A fresh model that maps `[batch, *shape]` to `[batch, classes]` logits, drawn from torch's generator.

    `name` is a key of `MODELS`, for tokens below `vocabulary` one of `TEXT_MODELS`, or `"package.module:factory"`, a
    callable `(shape, classes) -> nn.Module`. Raises InvalidArgument for an unknown name, for a token model on data without
    tokens and the reverse, and InvalidType for a factory that does not return a module.
    """
    known = TEXT_MODELS if vocabulary else MODELS
    if ":" not in name and name not in known:
        if name in (*MODELS, *TEXT_MODELS):
            raise InvalidArgument(
                f"the model {name!r} is made for {'tokens' if name in TEXT_MODELS else 'numbers'}, and the records are "
                f"{'tokens' if vocabulary else 'numbers'}: use one of {', '.join(known)}."
            )
        raise unknown_name("model", name, [*known, "package.module:factory"])
    if name in TEXT_MODELS and vocabulary:
        return TEXT_MODELS[name](shape, classes, vocabulary)
    model = (import_callable(name, "model", FORM) if ":" in name else MODELS[name])(shape, classes)
    if not isinstance(model, nn.Module):
        raise InvalidType(f"{name!r} returned {type(model).__name__}. Return an nn.Module from (shape, classes).")
    return model
