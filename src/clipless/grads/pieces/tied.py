"""A table that is an embedding and an output head at once.

Index legend: b record, s and t position, v row of the table, d feature.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from clipless.grads.pieces.instantiated import Instantiated
from clipless.grads.pieces.outer_products import CANCELLATION, OuterProducts
from clipless.grads.pieces.piece import Cost, Piece, sq_norm
from clipless.grads.pieces.scattered import Scattered


class Tied:
    """One table [v,d] used both by rows and as a matrix: g_b is the sum of both.

    The cross term needs no table per record: Σ_ts δ_s[i_t]·(a_s·g_t), δ the gradient of the head's output.
    """

    def __init__(self, table: Scattered, matrix: OuterProducts) -> None:
        self.table, self.matrix = table, matrix

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def sq_norms(self) -> Tensor:
        table, matrix = self.table, self.matrix
        index = table.indices.unsqueeze(1).expand(-1, matrix.grads.shape[1], -1)  # [b,s,t]
        cross = matrix.grads.gather(2, index) * (matrix.acts @ table.grads.mT)
        apart = table.sq_norms + matrix.sq_norms
        total = apart + 2 * cross.sum((1, 2))
        unsure = ~(total * CANCELLATION >= apart)
        for record in unsure.nonzero().flatten().tolist():
            total[record] = sq_norm(self.rows(slice(record, record + 1)).per_record())[0]
        return total

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        self.matrix.add_to(total, factors, beta)
        self.table.add_to(total, factors, beta=1)

    def per_record(self) -> Tensor:
        return self.table.add_to_each(self.matrix.per_record())

    def keep(self, mask: Tensor) -> "Tied":
        return Tied(self.table.keep(mask), self.matrix.keep(mask))

    def rows(self, some: slice) -> "Tied":
        return Tied(self.table.rows(some), self.matrix.rows(some))

    @property
    def signature(self) -> tuple[object, ...]:
        return (*self.matrix.signature, self.table.indices.shape[1])

    def ways(self) -> Mapping[str, Cost]:
        ways = dict(self.matrix.ways())
        b, s, d = self.matrix.acts.shape
        t, size = self.table.indices.shape[1], self.matrix.acts.element_size()
        ghost = ways["ghost"]
        cross = replace(ghost, flops=ghost.flops + 2.0 * b * s * t * d, moved=ghost.moved + 4.0 * size * b * s * t)
        return ways | {"ghost": replace(cross, calls=ghost.calls + 16)}

    def form(self, way: str) -> Piece:
        return self if way == "ghost" else Instantiated(self.per_record())
