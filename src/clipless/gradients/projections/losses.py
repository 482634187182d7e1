"""From the outputs of the model to the losses of the records: derivatives both ways, and whether the records stay apart."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clipless.errors import CliplessError, Misuse, UnsupportedModule
from clipless.gradients.capture.receiver import Output
from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.checks.records import mixed
from clipless.gradients.checks.seeds import IMPURE, impurity, seed_passes, sketch


class Losses:
    """The losses of the records as a function of the outputs of the model's passes, at the values that they had.

    The derivatives along a direction are those of the user's own graph, exact for any loss function that can be
    differentiated twice: v ↦ Jᵀv is linear, and its derivative with respect to v along t is J·t.
    """

    def __init__(self, losses: Tensor, passes: Sequence[ForwardPass]) -> None:
        self._losses, self._passes = losses, passes
        self._outputs = [output for one in passes for output in one.outputs]
        self._ones = torch.ones_like(losses, requires_grad=True)
        with torch.enable_grad():
            self._pulled = self.pulled(self._ones, create_graph=True)
        if all(part is None for part in self._pulled):
            raise Misuse("the losses do not depend on the model's output: compute them from what model(x) returned.")

    def pulled(self, weights: Tensor, create_graph: bool = False) -> Sequence[Tensor | None]:
        """The gradient of the weighted sum of the losses at every output; None where it does not depend on one."""
        return torch.autograd.grad(
            self._losses, self._outputs, weights, create_graph=create_graph, retain_graph=True, allow_unused=True
        )

    def moved(self, tangents: Sequence[Tensor | None]) -> Tensor:
        """How every record's loss moves as the outputs move along these, [b]."""
        pairs = [(p, t) for p, t in zip(self._pulled, tangents, strict=True) if p is not None and t is not None]
        if not pairs:
            return torch.zeros_like(self._losses).detach()
        try:
            (found,) = torch.autograd.grad(
                [pulled for pulled, _ in pairs], self._ones, [t for _, t in pairs], retain_graph=True
            )
        except RuntimeError as refused:
            if isinstance(refused, CliplessError):
                raise
            raise UnsupportedModule(
                f"the losses are computed by an operation that cannot be differentiated twice ({str(refused)[:120]}), which "
                "estimating norms by projections needs. Use gradients='exact'."
            ) from refused
        return found

    def refuse_mixed(self, number: int) -> None:
        """Raise if one record's loss depends on another's output, as seeds tell (see checks/seeds.py)."""
        records = len(self._losses)
        if records < 2:
            return
        places = [(one, k) for one in self._passes for k in range(len(one.outputs))]
        for seeds in seed_passes(records, self._losses.dtype, self._losses.device, number):
            for (one, k), plain, seeded in zip(places, self._pulled, self.pulled(seeds), strict=True):
                if plain is None or seeded is None:
                    continue
                dim = one.out_dims[k]
                rows = [_by_record(grad.detach(), dim, records) for grad in (plain, seeded)]
                if rows[0] is None or rows[1] is None or impurity(rows[0], rows[1], seeds) > IMPURE:
                    raise mixed(Output(one, one.out_dims))


def _by_record(grad: Tensor, dim: int | None, records: int) -> Tensor | None:
    """What is kept of a gradient, record by record; None if it has no rows that could be theirs."""
    if dim is not None:
        return sketch(grad, dim)
    if grad.dim() == 0 or len(grad) % records:
        return None
    return sketch(grad.reshape(records, -1), 0)


class Alias(torch.autograd.Function):
    """Identity on outputs that may be written to in place: the noted ones keep their place in the graph."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads
