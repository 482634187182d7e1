"""Whether a model can be trained on a data set at all, tried on made-up records before the first step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clipless.app.data import Data
from clipless.app.training.own_loss import made_up
from clipless.errors import CliplessError, InvalidArgument


def refuse_misfit(
    model: nn.Module, name: str, data: Data, losses: Callable[[Tensor, Tensor], Tensor], *, own_loss: bool
) -> None:
    """Raises InvalidArgument if the model, in evaluation mode, cannot take the records, or its output does not suit the
    loss of the task. The model's modes and torch's generator are left unchanged."""
    training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            x, y = made_up(data)
            output = model.eval()(x)
            if own_loss:  # which may take any output, and is tried by itself
                return
            if data.task in ("numbers", "labels") and output.shape != y.shape:
                raise _misfit(name, data, f"its output has shape {tuple(output.shape)} for {len(y)} records")
            losses(output, y)
    except CliplessError:
        raise
    except Exception as error:
        raise _misfit(name, data, str(error)) from error
    finally:
        for module, mode in training.items():
            module.training = mode


def _misfit(name: str, data: Data, why: str) -> InvalidArgument:
    each = " for each token" if data.task == "tokens" else ""
    outputs = {"numbers": "number", "labels": "logit"}.get(data.task, "logit") + ("" if data.classes == 1 else "s")
    return InvalidArgument(
        f"the model {name!r} cannot be trained on {data.name} ({why}). It must map records of shape {data.shape} to "
        f"{data.classes} {outputs}{each}."
    )
