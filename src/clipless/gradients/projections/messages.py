"""What gradients='jl' refuses, with the remedy."""

from typing import Any

import torch
from torch import Tensor, nn

from clipless.errors import Misuse, UnsupportedModule
from clipless.torch_internals import pytree


def refuse_inputs(name: str, inputs: tuple[Any, Any]) -> None:
    """Raise for inputs that were computed from parameters, and under autocast."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if any(tensor.requires_grad for tensor in tensors):
        raise UnsupportedModule(
            f"{name!r} is given a tensor that was computed from parameters, by a part of the model that was called before. "
            "gradients='jl' runs the model again from its inputs: call the whole model once, from a forward of its own, or "
            "use gradients='exact'."
        )
    if any(torch.is_autocast_enabled(kind) for kind in {"cpu", *(tensor.device.type for tensor in tensors)}):
        raise UnsupportedModule(
            "autocast computes with 16 bits, too few to estimate a norm by projections: train without it, or use "
            "gradients='exact'."
        )


def refuse_narrow(parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if parameter.dtype.itemsize < 4:
            raise UnsupportedModule(
                f"parameter {name!r} is {parameter.dtype}, with too few bits to estimate a norm by projections: use "
                "model.float(), or gradients='exact'."
            )


def plain_backward(name: str) -> Misuse:
    return Misuse(
        f"a gradient arrived at parameter {name!r} by a plain backward(): with gradients='jl' call private.backward(losses) "
        "with one loss per record (reduction='none')."
    )


def differs() -> UnsupportedModule:
    return UnsupportedModule(
        "forward mode and the backward pass do not agree on the gradient, so the norms cannot be trusted. The model gives "
        "another output when it is run again, uses parameters under no_grad() or outside the model's forward, or has a "
        "gradient that is not finite. Compute losses from the output of one call of the model, draw from torch's "
        "generator, or use gradients='exact'."
    )
