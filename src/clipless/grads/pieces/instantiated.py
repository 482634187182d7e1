"""Per-record gradients written out."""

from functools import cached_property

from torch import Tensor

from clipless.grads.pieces.piece import NoChoice, kept, sq_norm
from clipless.grads.pieces.rows import Weighted, add_rows


class Instantiated(NoChoice):
    """Per-record gradients written out: norm and weighted sum read the same buffer."""

    def __init__(self, grads: Tensor) -> None:
        self.grads = grads

    def __len__(self) -> int:
        return self.grads.shape[0]

    @property
    def flat(self) -> Tensor:
        """A row for every record, [b,n]."""
        return self.grads if self.grads.dim() == 2 else self.grads.reshape(self.grads.shape[0], -1)

    @cached_property
    def sq_norms(self) -> Tensor:
        return sq_norm(self.grads)

    @property
    def measured(self) -> bool:
        """Whether its norms are known already."""
        return "sq_norms" in vars(self)

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        add_rows([Weighted(total.view(-1), self.flat, factors, beta)])

    def per_record(self) -> Tensor:
        return self.grads

    def keep(self, mask: Tensor) -> "Instantiated":
        return Instantiated(kept(self.grads, mask))

    def rows(self, some: slice) -> "Instantiated":
        return Instantiated(self.grads[some])
