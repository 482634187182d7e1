"""The protocol of all forms, and the cost of a method to compute norms and sum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Cost:
    """The cost of a method for all records: operations, bytes moved through memory, calls of torch, and bytes held until the
    factors are known."""

    flops: float
    moved: float
    calls: int
    held: float


class Form(Protocol):
    """A parameter's per-sample gradients g_b, not necessarily written out.

    If there are several exact methods for the norms and the sum, `methods` has their names and costs, and `by` returns the
    form that uses one of them. A form without a choice has no methods.
    """

    def __len__(self) -> int:
        """The number of records."""

    @property
    def terms(self) -> int:
        """How many terms of each record `add_to` adds to the total one by one."""

    @property
    def sq_norms(self) -> Tensor:
        """‖g_b‖² for every record, [b], in float64 where the device has it. Never too small, perhaps slightly too large."""

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        """total = beta·total + Σ_b factors[b]·g_b, in place; with beta = 0 the old contents are ignored."""

    def per_record(self) -> Tensor:
        """All g_b written out, [b, *shape]."""

    def keep(self, mask: Tensor) -> "Form":
        """The form with exact zeros for the records outside the mask, also where they are NaN or infinite."""

    def rows(self, some: slice) -> "Form":
        """The form of some of the records."""

    def methods(self) -> Mapping[str, Cost]:
        """The methods and their costs."""

    def by(self, method: str) -> "Form":
        """The form that uses this method."""


class NoChoice:
    """A form with one method only, of which a sum has one term for each record."""

    @property
    def terms(self) -> int:
        return 1

    def methods(self) -> Mapping[str, Cost]:
        return {}

    def by(self, method: str) -> Form:
        raise KeyError(method)
