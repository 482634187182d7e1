"""What `clipless.clipped_sum` and `clipless.oracle.clipped_sum` both take and return. No engine code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

LossFunction = Callable[[nn.Module, Any], Tensor]
"""`loss_fn(model, batch)` returns one loss per record, shape (B,)."""


@dataclass(frozen=True)
class ClippedSum:
    """The clipped sum by parameter name, and the norms [G,B] of the records' gradients. Neither is private."""

    grads: dict[str, Tensor]
    norms: Tensor
