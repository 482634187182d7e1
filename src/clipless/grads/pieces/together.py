"""Norms and sums of many pieces at once: what is written out is read in one call, everything else piece by piece."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clipless.grads.pieces.instantiated import Instantiated
from clipless.grads.pieces.piece import Piece
from clipless.grads.pieces.rows import Weighted, add_rows, squared_lengths

# From so many bytes on a norm is taken at once, while what was written is still in the cache.
LARGE = 2**17


class Share(NamedTuple):
    """What a piece adds to its parameter's sum."""

    piece: Piece
    total: Tensor
    factors: Tensor  # [b]
    beta: int


def measured(piece: Piece) -> Piece:
    """The piece, its norms known if that is better done now than together with others."""
    if not isinstance(piece, Instantiated) or piece.grads.nbytes >= LARGE:
        piece.sq_norms  # noqa: B018
    return piece


def sq_norms_of(pieces: Sequence[Piece]) -> tuple[list[int], Tensor]:
    """‖g_b‖² of every piece and record, [n,b], and which piece each row is of."""
    rows = {k: p.flat for k, p in enumerate(pieces) if isinstance(p, Instantiated) and not p.measured}
    known = {k: piece.sq_norms for k, piece in enumerate(pieces) if k not in rows}
    found = [squared_lengths(list(rows.values()))] if rows else []
    found += [torch.stack(list(known.values()))] if known else []
    return [*rows, *known], found[0] if len(found) == 1 else torch.cat(found)


def add_all(shares: Iterable[Share]) -> None:
    """Add every share to its total; no two have the same."""
    written: list[Weighted] = []
    for piece, total, factors, beta in shares:
        if isinstance(piece, Instantiated):
            written.append(Weighted(total.view(-1), piece.flat, factors, beta))
        else:
            piece.add_to(total, factors, beta)
    if written:
        add_rows(written)
