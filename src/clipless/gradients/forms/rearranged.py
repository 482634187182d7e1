"""A matrix form for a parameter that is not a matrix."""

from collections.abc import Mapping

import torch
from torch import Tensor

from clipless.gradients.forms.form import Cost, Form


class Rearranged:
    """The form of a matrix [o,i] as that of a parameter: i is unflattened to `shape`, then the dimensions are permuted.

    `order` has, for every dimension of the parameter, its number in [o, *shape].
    """

    def __init__(self, matrix: Form, shape: tuple[int, ...], order: tuple[int, ...]) -> None:
        self.matrix, self.shape, self.order = matrix, shape, order

    def __len__(self) -> int:
        return len(self.matrix)

    @property
    def terms(self) -> int:
        return self.matrix.terms

    @property
    def sq_norms(self) -> Tensor:
        return self.matrix.sq_norms

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        inverse = [self.order.index(k) for k in range(len(self.order))]
        ours = total.permute(inverse)  # [o, *shape]
        if ours.is_contiguous():
            self.matrix.add_to(ours.flatten(1), factors, beta)
            return
        sums = torch.empty(ours.shape, dtype=total.dtype, device=total.device)
        self.matrix.add_to(sums.flatten(1), factors, beta=0)
        if beta == 0:
            ours.copy_(sums)
        else:
            ours.add_(sums)

    def per_record(self) -> Tensor:
        return self.matrix.per_record().unflatten(2, self.shape).permute(0, *(k + 1 for k in self.order))

    def keep(self, mask: Tensor) -> "Rearranged":
        return Rearranged(self.matrix.keep(mask), self.shape, self.order)

    def rows(self, some: slice) -> "Rearranged":
        return Rearranged(self.matrix.rows(some), self.shape, self.order)

    def methods(self) -> Mapping[str, Cost]:
        return self.matrix.methods()

    def by(self, method: str) -> "Rearranged":
        return Rearranged(self.matrix.by(method), self.shape, self.order)
