"""What plain autograd gives for a pass that was run again."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipless.errors import CliplessError
from clipless.gradients.checks.records import gradients_set_aside, leaves_of
from clipless.gradients.shards import own_rows


def plain_gradients(
    outputs: list[Tensor],
    grads: Sequence[Tensor | None],
    parameters: Mapping[str, nn.Parameter],
    gathered: Mapping[str, nn.Parameter] | None,
) -> dict[str, Tensor]:
    """The parameters' gradients, from those that arrived at the outputs; `gathered` are sharded parameters as a whole."""
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
    if not pairs:
        return {}
    roots, arrived = [output for output, _ in pairs], [grad for _, grad in pairs]
    if gathered is not None:
        return _own_rows_of_gradients(roots, arrived, parameters, gathered)
    try:
        found: Any = torch.autograd.grad(
            roots, list(parameters.values()), arrived, retain_graph=True, allow_unused=True
        )
    except RuntimeError as refused:
        if isinstance(refused, CliplessError) or "use_reentrant" not in str(refused):
            raise
        with gradients_set_aside([*leaves_of(roots), *parameters.values()]):
            torch.autograd.backward(roots, arrived)
            found = [parameter.grad for parameter in parameters.values()]
    named = zip(parameters, found, strict=True)
    return {name: grad.to_dense() if grad.is_sparse else grad for name, grad in named if grad is not None}


def _own_rows_of_gradients(
    roots: list[Tensor],
    arrived: list[Tensor],
    parameters: Mapping[str, nn.Parameter],
    gathered: Mapping[str, nn.Parameter],
) -> dict[str, Tensor]:
    """This process's rows of the gradients of sharded parameters, of which at most one is held as a whole at a time."""
    found: dict[str, Tensor] = {}

    def keep(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            rows = own_rows(parameter.grad, parameters[name])
            found[name] = found[name] + rows if name in found else rows.clone()
            parameter.grad = None

    handles = [gathered[name].register_post_accumulate_grad_hook(partial(keep, name)) for name in parameters]
    try:
        with gradients_set_aside(leaves_of(roots)):
            torch.autograd.backward(roots, arrived)
    finally:
        for handle in handles:
            handle.remove()
    return found
