"""From pieces to the clipped sum: norms of all records, factors from the rule, one weighted sum per parameter."""

from collections.abc import Callable, Mapping
from functools import reduce

import torch
from torch import Tensor, nn

from clipless.grads.buffers import Buffers
from clipless.grads.frames import Part
from clipless.grads.pieces import Piece, combine, formed
from clipless.grads.receiver import Receiver
from clipless.grads.tape import Tape
from clipless.grads.tuner import Tuner
from clipless.partition import Partition

Factors = Callable[[Tensor, int], Tensor]
Observe = Callable[[Tensor], None]


class Engine:
    """Adds up clipped per-record gradients over the parts of a logical batch.

    `open(records, scale)` before each part's forward pass. `scale` undoes the loss's own division, so that norms are
    those of each record's own loss: the part's size for a mean, 1 for a sum. After backward the part's share is in
    `sums`, in at least float32, keyed by parameter name. A parameter that no record reached has no entry.

    `factors(norms [1,b], group)` says how much of each record enters the sum, for any of the part's records at a time;
    `observe(norms [G,B])` sees all norms of a part once.
    """

    def __init__(self, model: nn.Module, groups: Partition, factors: Factors, observe: Observe, tuner: Tuner) -> None:
        self.sums: dict[str, Tensor] = {}
        self.seen = 0
        self.tape = Tape(model, Receiver(self._take, self._finish))
        self._groups = groups
        self._factors = factors
        self._observe = observe
        self._tuner = tuner
        self._scale = 1.0
        self._buffers = Buffers()
        self._clips: list[Clip] = []

    def clear(self) -> None:
        """Forget the sums: a new logical batch begins."""
        self.sums, self.seen = {}, 0
        self.tape.open(None)

    def complete(self) -> dict[str, Tensor]:
        """The sum of every parameter, to be turned into what is released: zeros for those that no record reached."""
        for name, parameter in self.tape.parameters.items():
            if name not in self.sums:
                self.sums[name] = self._buffers.take(name, parameter).zero_()
        return {name: self.sums[name] for name in self.tape.parameters}

    def open(self, records: int, scale: float) -> None:
        self._scale = scale
        self._tuner.begin()
        dtype = reduce(torch.promote_types, (p.dtype for p in self.tape.parameters.values()), torch.float32)
        zeros = torch.zeros(records, dtype=dtype, device=next(iter(self.tape.parameters.values())).device)
        self._clips = [Clip(set(members), zeros) for members in self._groups.members]
        self.tape.open(Part(records))

    def _take(self, part: Part, name: str, uses: list[Piece]) -> None:
        """All pieces of a parameter are there. A group with all its parameters is clipped at once, in the first part."""
        group = self._groups.group_of[name]
        clip, parameter, piece = self._clips[group], self.tape.parameters[name], combine(uses)
        clip.waiting.discard(name)
        early = not (clip.waiting or self.seen)
        way, chunks = self._tuner.in_chunks(piece, parameter) if early else (self._tuner.way(piece, parameter), [])
        if len(self._clips) > 1 and not self.seen:
            clip.raw[name] = piece, way
        if len(chunks) > 1:
            norms = [self._clipped(group, name, piece.rows(some).form(way), some) for some in chunks]
            self._close(group, torch.cat(norms))
            return
        clip.hold(name, formed(piece, way))
        if early:
            self._close(group, self._norms(clip.squares))

    def _clipped(self, group: int, name: str, piece: Piece, some: slice) -> Tensor:
        """Clip and add these records of the last piece of a group. Returns the norms of the records."""
        norms = self._norms(self._clips[group].squares[some] + piece.sq_norms)
        self._add({name: piece}, norms, group)
        return norms

    def _close(self, group: int, norms: Tensor) -> None:
        """All norms of a group are known: add what was held for it."""
        clip = self._clips[group]
        clip.norms = norms
        self._add(clip.held, norms, group)
        clip.held = {}

    def _finish(self, part: Part) -> None:
        """Clip what is left. A record that is not finite in one group counts as infinite in every group."""
        clipped = [clip.norms is not None for clip in self._clips]
        rows = [self._norms(clip.squares) if clip.norms is None else clip.norms for clip in self._clips]
        finite = torch.stack(rows).isfinite()
        norms = torch.where(finite.all(0), torch.stack(rows), torch.inf)
        for group, clip in enumerate(self._clips):
            if not clipped[group]:
                self._close(group, norms[group])
            elif bool((finite[group] & ~finite.all(0)).any()):
                for name, (piece, way) in clip.raw.items():
                    del self.sums[name]
                    self._add({name: formed(piece, way)}, norms[group], group)
        self._observe(norms)
        self._clips = []
        self.seen += part.records

    def _add(self, pieces: Mapping[str, Piece], norms: Tensor, group: int) -> None:
        if not pieces:
            return
        finite = norms.isfinite()
        everyone = bool(finite.all())
        factors = self._factors(norms.unsqueeze(0), group)[0] * self._scale
        for name, piece in pieces.items():
            safe = piece if everyone else piece.keep(finite)
            begun = name in self.sums
            if not begun:
                self.sums[name] = self._buffers.take(name, self.tape.parameters[name])
            safe.add_to(self.sums[name], factors, beta=int(begun))

    def _norms(self, squares: Tensor) -> Tensor:
        """Norms [b] of some records in one group; infinite for those that are not finite.

        Squares that small lose digits to underflow, and a norm taken for too small would give too large a factor:
        below the floor a norm counts as zero.
        """
        norms = squares.sqrt()
        norms = torch.where(norms < 1e4 * torch.finfo(norms.dtype).tiny ** 0.5, 0.0, norms) * self._scale
        return torch.where(norms.isfinite(), norms, torch.inf)


class Clip:
    """A group of parameters on its way to be clipped: which are still to come, and what is held until then.

    `raw` are its pieces as they came, without the buffers that ways make of them, and the ways: should a record turn out
    not to be finite in another group after this one was clipped, the group is added up again without it, the same way, so
    that the sum keeps to the norms it was clipped by.
    """

    def __init__(self, waiting: set[str], squares: Tensor) -> None:
        self.waiting = waiting
        self.squares = squares
        self.held: dict[str, Piece] = {}
        self.raw: dict[str, tuple[Piece, str]] = {}
        self.norms: Tensor | None = None

    def hold(self, name: str, piece: Piece) -> None:
        self.squares = self.squares + piece.sq_norms
        self.held[name] = piece
