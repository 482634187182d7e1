"""Pieces: one parameter's share of the gradient, record by record, in whichever form is cheap to hold."""

from clipless.grads.pieces.combine import combine
from clipless.grads.pieces.instantiated import Instantiated
from clipless.grads.pieces.outer_products import OuterProducts, product_ways
from clipless.grads.pieces.piece import Cost, NoChoice, Piece, formed, kept, scaled, sq_norm, weighted_sum
from clipless.grads.pieces.rearranged import Rearranged
from clipless.grads.pieces.rows import widest
from clipless.grads.pieces.scattered import Scattered
from clipless.grads.pieces.scratch import empty, forget
from clipless.grads.pieces.tied import Tied
from clipless.grads.pieces.together import Share, add_all, measured, sq_norms_of

__all__ = [
    "Cost",
    "Instantiated",
    "NoChoice",
    "OuterProducts",
    "Piece",
    "Rearranged",
    "Scattered",
    "Share",
    "Tied",
    "add_all",
    "combine",
    "empty",
    "forget",
    "formed",
    "kept",
    "measured",
    "product_ways",
    "scaled",
    "sq_norm",
    "sq_norms_of",
    "weighted_sum",
    "widest",
]
