"""The weighted sum from passes that are run again, for the few batches where the user's own pass does not give it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from clipless.errors import UnsupportedModule
from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.records import selected
from clipless.gradients.trees import differentiable


def sum_without(
    broken: Tensor, passes: Sequence[ForwardPass], pulled: Sequence[Tensor | None], parameters: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The sum where some records, [b], are not finite: the passes are run again with another record in the place of each,
    and nothing of it is added. 0 times infinity would be no number. `pulled` are the gradients at the outputs."""
    if bool(broken.all()):
        return [None] * len(parameters)
    rows = torch.where(broken, int((~broken).int().argmax()), torch.arange(len(broken), device=broken.device))
    arriving, outputs, arrived = iter(pulled), [], []
    for one in passes:
        assert one.rerun is not None
        if not one.reading or any(dim is None for dim in one.out_dims):
            raise UnsupportedModule(
                f"a record's gradient is not finite, and {one.name!r} has no row for each record in its input and output, "
                "so that it cannot be left out. Return one row per record, or use gradients='exact'."
            )
        with torch.enable_grad():
            again = differentiable(one.rerun(selected(one.rerun.inputs, one.reading, rows))[0])
        for place, dim in zip(one.places, one.out_dims, strict=True):
            grad = next(arriving)
            if grad is not None:
                outputs.append(again[place])
                arrived.append(grad.index_fill(dim or 0, broken.nonzero()[:, 0], 0.0))
    return torch.autograd.grad(outputs, parameters, arrived, allow_unused=True)


def sum_again(
    kernels: AbstractContextManager[None],
    passes: Sequence[ForwardPass],
    pulled: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """The sum of passes that are run again as they were, with these kernels."""
    arriving, outputs, arrived = iter(pulled), [], []
    with torch.enable_grad(), kernels:
        for one in passes:
            assert one.rerun is not None
            again = differentiable(one.rerun()[0])
            for place in one.places:
                grad = next(arriving)
                if grad is not None and place < len(again) and again[place].shape == grad.shape:
                    outputs.append(again[place])
                    arrived.append(grad)
        return torch.autograd.grad(outputs, parameters, arrived, allow_unused=True)
