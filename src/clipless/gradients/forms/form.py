"""What every form can do, and what the methods to compute its norms and sum cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Cost:
    """What a method costs for all records together: operations, bytes moved through memory, calls of torch, and the bytes
    held until the factors are known."""

    flops: float
    moved: float
    calls: int
    held: float


class Form(Protocol):
    """A parameter's per-record gradients g_b, not necessarily written out.

    Where several exact methods lead to the norms and the sum, `methods` names them with their costs and `by` takes one;
    what `by` returns offers no further choice. A form without a choice has no methods.
    """

    def __len__(self) -> int:
        """The number of records."""

    @property
    def sq_norms(self) -> Tensor:
        """‖g_b‖² for every record, [b], in float64 where the device has it. Too large rather than too small."""

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        """total = beta·total + Σ_b factors[b]·g_b, in place; with beta = 0 whatever was there is forgotten."""

    def per_record(self) -> Tensor:
        """All g_b written out, [b, *shape]."""

    def keep(self, mask: Tensor) -> "Form":
        """The same form with the records outside the mask replaced by exact zeros, be they NaN or infinite."""

    def rows(self, some: slice) -> "Form":
        """The form of some of the records."""

    def methods(self) -> Mapping[str, Cost]:
        """The exact methods to this form."""

    def by(self, method: str) -> "Form":
        """The form by that method."""


class NoChoice:
    """A form with one method only."""

    def methods(self) -> Mapping[str, Cost]:
        return {}

    def by(self, method: str) -> Form:
        raise KeyError(method)
