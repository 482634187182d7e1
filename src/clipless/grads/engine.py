"""From pieces to the clipped sum: norms of all records, factors from the rule, one weighted sum per parameter."""

from collections.abc import Callable, Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipless.clipping import least_norm
from clipless.grads.buffers import Buffers
from clipless.grads.entry import Entry
from clipless.grads.frames import Part, interrupted
from clipless.grads.pieces import Piece, Share, add_all, combine, forget, formed, measured, sq_norms_of, widest
from clipless.grads.receiver import Receiver
from clipless.grads.tape import Tape
from clipless.grads.tuner import Choice, Tuner
from clipless.partition import Partition

Factors = Callable[[Tensor, Sequence[int]], Tensor]
Observe = Callable[[Tensor], None]

# The most records that are added up in float32.
BLOCK = 2048


class Engine:
    """Adds up clipped per-record gradients over the parts of a logical batch.

    `open(records, scale)` before each part's forward pass. `scale` undoes the loss's own division, so that norms are
    those of each record's own loss: the part's size for a mean, 1 for a sum. After backward the part's share is in
    `sums`, in at least float32, keyed by parameter name. A parameter that no record reached has no entry.

    `factors(norms [g,b], groups)` says how much of each record enters those groups' sums, for any of the part's records;
    `observe(norms [G,B])` sees all norms of a part once. A group is clipped as soon as its parameters are there, and what
    was held for it is dropped. A record with a norm that is not finite, or too small to count, adds nothing to that
    group; one whose data are not finite adds nothing to any.

    Blocks of at most `BLOCK` records are added up in float32 and the blocks in float64, so that a sum is exact to a small
    part of one record's share, however many there are.
    """

    def __init__(self, model: nn.Module, groups: Partition, factors: Factors, observe: Observe, tuner: Tuner) -> None:
        self._sums: dict[str, Tensor] = {}
        self._blocks: dict[str, Tensor] = {}
        self._filled: dict[str, int] = {}
        self.seen = 0
        self.tape = Tape(model, Receiver(self._take, self._finish))
        if len(groups) > 1:
            self.tape.look_at_data()
        self.tape.interrupted = self._reopen
        self._groups = groups
        self._factors = factors
        self._observe = observe
        self._tuner = tuner
        self._scale = 1.0
        self._opened: tuple[int, float, bool] = (0, 1.0, False)
        self._dtype = reduce(torch.promote_types, (p.dtype for p in self.tape.parameters.values()), torch.float32)
        self._device = next(iter(self.tape.parameters.values())).device
        self._buffers = Buffers()
        self._clips: list[Clip] = []
        self._ready: dict[int, float] = {}
        self._checked: list[Entry] = []
        self._added = False

    def clear(self) -> None:
        """Forget the sums: a new logical batch begins."""
        self._forget_sums()
        self.seen, self._checked = 0, []
        self.tape.open(None)

    def _forget_sums(self) -> None:
        self._sums, self._blocks, self._filled = {}, {}, {}

    def close(self) -> None:
        """Take the hooks off the model, and give back the memory that was kept for further steps."""
        self.tape.detach()
        forget()

    def refuse_unsound(self) -> None:
        """Raise if the batch has written into the model, or if a check finds a gradient lost or outputs that depend on other
        records."""
        self.tape.refuse_changes()
        self.tape.self_check.compare(self._checked, self.tape.parameters)
        self._checked = []

    def complete(self) -> dict[str, Tensor]:
        """The sum of every parameter: zeros for those that no record reached."""
        sums = self.sums
        for name, parameter in self.tape.parameters.items():
            if name not in sums:
                self._sums[name] = sums[name] = self._buffers.take(name, parameter).zero_()
        return {name: sums[name] for name in self.tape.parameters}

    @property
    def sums(self) -> dict[str, Tensor]:
        """The sums so far, all blocks together."""
        for name, blocks in self._blocks.items():
            self._sums[name].copy_(blocks.add_(self._sums[name]))
        self._blocks.clear()
        return self._sums

    def open(self, records: int, scale: float, averaged: bool = False) -> None:
        """The next forward and backward pass is on so many records, by whose number an `averaged` loss divides."""
        self._scale, self._opened = scale, (records, scale, averaged)
        self._tuner.begin()
        self._clips = [Clip(set(members)) for members in self._groups.members]
        self._ready = {}
        self._added = False
        self.tape.open(Part(records, due=self.tape.self_check.due(records), averaged=averaged))

    def backward(self, losses: Tensor) -> None:
        """From one loss for each record of the part."""
        part = self.tape.part
        if part is not None and part.records and losses.requires_grad:
            self._scale, part.averaged = 1.0, False
            if part.check is not None:
                part.check.seed_losses(losses)
        losses.backward(torch.ones_like(losses))

    def _reopen(self) -> None:
        """Begin the part anew after a backward pass that was interrupted, if nothing of it is mixed with other parts."""
        if self._added and self.seen:
            raise interrupted(again=True)
        if self._added:
            self._forget_sums()
        self.open(*self._opened)

    def _take(self, part: Part, name: str, uses: list[Piece]) -> None:
        """All pieces of a parameter are there. Groups with all their parameters are clipped soon."""
        group = self._groups.group_of[name]
        clip, parameter, piece = self._clips[group], self.tape.parameters[name], combine(uses)
        clip.waiting.discard(name)
        complete = not clip.waiting
        self._tuner.expected = part.tapped
        choice = self._tuner.in_chunks(piece, parameter) if complete else self._tuner.choose(piece, parameter)
        if len(choice.chunks) > 1:
            self._clip_chunks(group, name, piece, choice)
            return
        clip.held[name] = measured(formed(piece, choice.way))
        if complete:
            self._ready[group] = choice.held
            if sum(self._ready.values()) > self._tuner.chunk_bytes:
                groups = list(self._ready)
                self._add(groups, self._norms(self._squares(groups)))

    def _clip_chunks(self, group: int, name: str, piece: Piece, choice: Choice) -> None:
        """Clip and add a group whose last piece is taken some records at a time."""
        others, norms = self._squares([group])[0], []
        for some in choice.chunks:
            part = formed(piece.rows(some), choice.way)
            norms.append(self._norms((others[some] + part.sq_norms).unsqueeze(0), some))
            self._sum([{name: part}], norms[-1], [group])
        self._add([group], torch.cat(norms, 1))

    def _finish(self, part: Part) -> None:
        """Clip what is left."""
        left = [group for group, clip in enumerate(self._clips) if clip.norms is None]
        if left:
            self._add(left, self._norms(self._squares(left)))
        self._observe(torch.stack([clip.norms for clip in self._clips if clip.norms is not None]))
        self._clips = []
        self.seen += part.records
        self._checked += self.tape.self_check.passed(part)

    def _add(self, groups: list[int], norms: Tensor) -> None:
        """Clip by the norms [g,b], and add, what is held for these groups."""
        clips = [self._clips[group] for group in groups]
        self._sum([clip.held for clip in clips], norms, groups)
        for group, clip, row in zip(groups, clips, norms, strict=True):
            clip.norms, clip.held = row, {}
            self._ready.pop(group, None)

    def _sum(self, held: list[dict[str, Piece]], norms: Tensor, groups: list[int]) -> None:
        """Add each group's pieces, their records times their factors, and nothing of records whose norm is infinite."""
        if not any(held):
            return
        self._added = True
        factors = self._factors(norms, groups).masked_fill(norms == 0, 0.0) * self._scale
        finite = norms.isfinite()
        everyone = bool(finite.all())
        records = norms.shape[1]
        for first in range(0, records, BLOCK):
            some, shares = slice(first, min(first + BLOCK, records)), []
            for pieces, row, mask in zip(held, factors.unbind(), finite.unbind(), strict=True):
                for name, piece in pieces.items():
                    few = piece if records <= BLOCK else piece.rows(some)
                    begun = self._begun(name, len(few))
                    few = few if everyone else few.keep(mask[some])
                    shares.append(Share(few, self._sums[name], row[some], int(begun)))
            add_all(shares)

    def _begun(self, name: str, records: int) -> bool:
        """Whether so many more records are added to what is there. Else there is nothing yet, or a full block, which is set
        aside, and there is room for them."""
        filled = self._filled.get(name)
        if filled is not None and filled + records <= BLOCK:
            self._filled[name] = filled + records
            return True
        self._filled[name] = records
        if filled is None:
            self._sums[name] = self._buffers.take(name, self.tape.parameters[name])
        elif name in self._blocks:
            self._blocks[name].add_(self._sums[name])
        else:
            self._blocks[name] = self._sums[name].to(widest(self._device), copy=True)
        return False

    def _squares(self, groups: list[int]) -> Tensor:
        """Squared norms of what is held for these groups, [g,b]."""
        records = 0 if self.tape.part is None else self.tape.part.records
        squares = torch.zeros(len(groups), records, dtype=widest(self._device), device=self._device)
        held = [(row, piece) for row, group in enumerate(groups) for piece in self._clips[group].held.values()]
        if held:
            order, found = sq_norms_of([piece for _, piece in held])
            rows = torch.tensor([held[k][0] for k in order], device=self._device)
            squares.index_add_(0, rows, found)
        return squares

    def _norms(self, squares: Tensor, some: slice = slice(None)) -> Tensor:
        """Norms of some records; infinite for those that are not finite, or whose data are not, and zero for those that are
        too small to count."""
        norms = squares.to(self._dtype).sqrt().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        norms = F.threshold(norms, least_norm(norms.dtype), 0.0).mul_(self._scale)
        broken = None if self.tape.part is None else self.tape.part.broken
        return norms if broken is None else norms.masked_fill_(broken[some], torch.inf)


class Clip:
    """A group of parameters on its way to be clipped: which are still to come, and what is held until then."""

    def __init__(self, waiting: set[str]) -> None:
        self.waiting = waiting
        self.held: dict[str, Piece] = {}
        self.norms: Tensor | None = None
