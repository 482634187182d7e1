"""A table that is used as an embedding and as an output head.

Index legend: b record, s and t position, v row of the table, d feature.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from clipless.gradients.forms.cancellation import never_too_small
from clipless.gradients.forms.dense import Instantiated, OuterProducts, product_methods, sq_norm
from clipless.gradients.forms.form import Cost, Form
from clipless.gradients.forms.scattered import Scattered
from clipless.native.by_torch import widest


class Tied:
    """A table [v,d] that is used both by rows and as a matrix: g_b is the sum of both gradients.

    The cross term of the norm needs no table per record: Σ_ts δ_s[i_t]·(a_s·g_t), δ the gradient of the head's output.
    """

    def __init__(self, table: Scattered, matrix: OuterProducts) -> None:
        self.table, self.matrix = table, matrix

    def __len__(self) -> int:
        return len(self.table)

    @property
    def terms(self) -> int:
        return self.matrix.terms

    @cached_property
    def sq_norms(self) -> Tensor:
        table, matrix = self.table, self.matrix
        index = table.indices.unsqueeze(1).expand(-1, matrix.grads.shape[1], -1)  # [b,s,t]
        cross = matrix.grads.gather(2, index) * (matrix.acts @ table.grads.mT)
        squares, lengths, lost = matrix.ghost
        total = table.summed(table.grads) + squares + 2 * cross.sum((1, 2), dtype=squares.dtype)
        return never_too_small(total, table.lengths + lengths, table.grads.dtype, self._exact, lost)

    def _exact(self, which: Tensor) -> Tensor:
        """Squared norms of some records, from their gradients in float64, one table at a time."""
        return torch.cat([sq_norm(self._wide(record).per_record()) for record in which.nonzero().flatten().tolist()])

    def _wide(self, record: int) -> "Tied":
        one, wide = self.rows(slice(record, record + 1)), widest(self.table.grads.device)
        table = Scattered(one.table.indices, one.table.grads.to(wide), one.table.size)
        return Tied(table, OuterProducts(one.matrix.acts.to(wide), one.matrix.grads.to(wide)))

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        self.matrix.add_to(total, factors, beta)
        self.table.add_to(total, factors, beta=1)

    def per_record(self) -> Tensor:
        return self.table.add_to_each(self.matrix.per_record())

    def keep(self, mask: Tensor) -> "Tied":
        return Tied(self.table.keep(mask), self.matrix.keep(mask))

    def rows(self, some: slice) -> "Tied":
        return Tied(self.table.rows(some), self.matrix.rows(some))

    def methods(self) -> Mapping[str, Cost]:
        b, s, d = self.matrix.acts.shape
        t, size = self.table.indices.shape[1], self.matrix.acts.element_size()
        methods = dict(product_methods(b, s, d, self.matrix.grads.shape[2], size))
        ghost = methods["ghost"]
        cross = replace(ghost, flops=ghost.flops + 2.0 * b * s * t * d, moved=ghost.moved + 4.0 * size * b * s * t)
        return methods | {"ghost": replace(cross, calls=ghost.calls + 16)}

    def by(self, method: str) -> Form:
        return self if method == "ghost" else Instantiated(self.per_record())
