"""One piece for a parameter that was used several times."""

from functools import reduce

import torch

from clipless.grads.pieces.instantiated import Instantiated
from clipless.grads.pieces.outer_products import OuterProducts
from clipless.grads.pieces.piece import Piece
from clipless.grads.pieces.scattered import Scattered
from clipless.grads.pieces.tied import Tied


def combine(uses: list[Piece]) -> Piece:
    """The sum over the uses, as one piece.

    Uses of one kind are one longer sequence of positions; both kinds of use of a table are `Tied`; anything else is
    written out.
    """
    if len(uses) == 1:
        return uses[0]
    matrices = [use for use in uses if isinstance(use, OuterProducts)]
    tables = [use for use in uses if isinstance(use, Scattered)]
    if len(matrices) + len(tables) < len(uses):
        return Instantiated(reduce(torch.add, (use.per_record() for use in uses)))
    if not tables:
        return _longer_product(matrices)
    if not matrices:
        return _longer_table(tables)
    return Tied(_longer_table(tables), _longer_product(matrices))


def _longer_product(uses: list[OuterProducts]) -> OuterProducts:
    if len(uses) == 1:
        return uses[0]
    return OuterProducts(torch.cat([use.acts for use in uses], 1), torch.cat([use.grads for use in uses], 1))


def _longer_table(uses: list[Scattered]) -> Scattered:
    if len(uses) == 1:
        return uses[0]
    indices, grads = torch.cat([use.indices for use in uses], 1), torch.cat([use.grads for use in uses], 1)
    return Scattered(indices, grads, uses[0].size)
