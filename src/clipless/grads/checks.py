"""The checks that a training run makes on its own model, loss and batch: records stay apart, and no gradient is lost.

Both look at the user's own forward pass. *Records*: before the gradients are used, backward passes with seeds (see seeds.py)
go through the same graph, from the losses if these are known one by one, else from the gradient at the model's output.
*Totals*: the engine's sums over the records, without clipping, are those that plain autograd gives for the same outputs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from clipless.errors import CliplessError, Misuse, UnsupportedModule
from clipless.grads.entry import Entry
from clipless.grads.layout import Dims
from clipless.grads.pieces import Piece
from clipless.grads.seeds import IMPURE, impurity, seed_passes, sketch

ROOT = "(output)"


class CheckSchedule:
    """When a run checks itself, besides at whatever is new: at the first two batches that can show whether records mix, then
    at the fourth, the eighth and so on. Batches without records do not count.

    >>> schedule = CheckSchedule()
    >>> [schedule.due(records) for records in (0, 1, 5, 5, 5, 5, 5, 5, 5, 5)]
    [False, True, True, True, False, True, False, False, False, True]
    """

    def __init__(self) -> None:
        self._met = 0

    def due(self, records: int) -> bool:
        """Whether to check a part of so many records."""
        if records > 1:
            self._met += 1
        return records > 0 and self._met & (self._met - 1) == 0


class Heard(Protocol):
    """A tap whose gradient has arrived. `unsure` is set where nothing has told yet along which dimension records lie."""

    entry: Entry | None
    owner: str
    out_dims: Dims
    unsure: bool

    def settle(self, dims: Dims) -> None:
        """The records of the outputs lie along these dimensions."""


class Trial:
    """A backward pass of which nothing is used for training. `echoes` has what arrived at each tap, one after the other;
    `totals`, if it adds up those of a pass, the sums over the records of what arrived in that one. Kept `whole`, or in a
    sketch."""

    def __init__(self, adds_up: Entry | None = None, whole: bool = False) -> None:
        self._whole = whole
        self.echoes: dict[tuple[int, str], list[list[Tensor]]] = {}
        self.adds_up = adds_up
        self.totals = None if adds_up is None else adds_up.totals

    def hear(self, tap: Heard, grads: Sequence[Tensor]) -> None:
        pairs = zip(grads, tap.out_dims, strict=True)
        kept = [g.detach().clone() if tap.unsure or self._whole else sketch(g, dim or 0) for g, dim in pairs]
        self.echoes.setdefault(_key(tap), []).append(kept)

    def add(self, name: str, piece: Piece, like: Tensor) -> None:
        assert self.totals is not None
        total = self.totals.get(name)
        if total is None:
            kind = torch.promote_types(like.dtype, torch.float32)
            total = self.totals[name] = torch.zeros(like.shape, dtype=kind, device=like.device)
        piece.add_to(total, torch.ones(len(piece), dtype=total.dtype, device=total.device), beta=1)

    def forget(self) -> None:
        """The pass begins anew."""
        self.echoes.clear()
        if self.totals is not None:
            self.totals.clear()


def _key(tap: Heard) -> tuple[int, str]:
    return 0 if tap.entry is None else id(tap.entry), tap.owner


class PartCheck:
    """The checks on one part of a batch. `run` is the receiver's: a backward pass whose gradients go to a trial."""

    def __init__(self, records: int, number: int, run: Callable[..., None]) -> None:
        self.at_losses = False
        self.entries: list[Entry] = []
        self._records, self._number, self._run = records, number, run
        self._seeds: list[Tensor] = []
        self._trials: list[Trial] = []
        self._positions: Trial | None = None
        self._arrivals: dict[tuple[int, str], int] = {}

    def seed_losses(self, losses: Tensor) -> None:
        """Run the seeded passes from the losses of the records."""
        self.at_losses = True
        self._seeded([losses], [torch.ones_like(losses)], (0,), self._anchors())

    def _anchors(self) -> list[Tensor]:
        """Those of all passes: one may go on from another's output."""
        return [entry.anchor for entry in self.entries]

    def at_output(self, entry: Entry, grads: tuple[Tensor | None, ...]) -> None:
        """The gradients of the outermost module's output have arrived, and go no further before this returns."""
        pairs = [(out, grad) for out, grad in zip(entry.outputs, grads, strict=True) if grad is not None]
        outputs, arrived = [out for out, _ in pairs], [grad.detach() for _, grad in pairs]
        if not self.at_losses:
            dims = tuple(dim for dim, grad in zip(entry.out_dims, grads, strict=True) if grad is not None)
            entry.loss_inside = len(arrived) == 1 and arrived[0].dim() == 0
            if not entry.loss_inside:
                self._refuse_whole_batch(entry, arrived, dims)
                self._seeded(outputs, arrived, dims, self._anchors())
                self._seed_positions(entry, outputs, arrived)
        if entry.rerun is not None or not self.at_losses:
            self._run(outputs, arrived, self._anchors(), Trial(entry))
        if self._positions is not None:
            raise Misuse(
                f"the input and the output of {entry.name!r} have as many numbers along their second dimension as there are "
                "records in the first batch, and nothing tells which of them are the records. Call "
                "private.backward(losses) with one loss per record, which tells."
            )
        entry.grads = tuple(None if grad is None else grad.detach() for grad in grads)

    def _seed_positions(self, entry: Entry, outputs: list[Tensor], grads: list[Tensor]) -> None:
        """Where the first batch is square, seed what may be positions as well: if they too stay apart everywhere, nothing
        tells which are the records."""
        self._positions = None
        if entry.square and self._trials and all(self._is_square(grad) for grad in grads):
            self._positions = Trial(whole=True)
            seeded = [_times(grad, self._seeds[0], 1) for grad in grads]
            self._run(outputs, seeded, self._anchors(), self._positions)

    def _is_square(self, grad: Tensor) -> bool:
        return grad.shape[:2] == (self._records, self._records)

    def _refute_positions(self, tap: Heard, grads: Sequence[Tensor], place: int) -> None:
        assert self._positions is not None
        echoes = self._positions.echoes.get(_key(tap), [])
        if not all(self._is_square(grad) for grad in grads) or place >= len(echoes):
            self._positions = None
            return
        pairs = zip(grads, echoes[place], strict=True)
        if any(impurity(sketch(grad, 1), sketch(echo, 1), self._seeds[0]) > IMPURE for grad, echo in pairs):
            self._positions = None

    def compare(self, tap: Heard, grads: Sequence[Tensor]) -> None:
        """The gradients that arrived at a tap, beside those of the seeded passes; refused if records are not apart."""
        if not self._trials:
            return
        key = _key(tap)
        place = self._arrivals[key] = self._arrivals.get(key, -1) + 1
        echoes = [trial.echoes.get(key, ()) for trial in self._trials]
        if any(place >= len(echo) for echo in echoes):
            return
        seeded = [echo[place] for echo in echoes]
        if self._positions is not None:
            self._refute_positions(tap, grads, place)
        if tap.unsure:
            tap.settle(self._told(tap, grads, seeded))
            return
        for number, (grad, dim) in enumerate(zip(grads, tap.out_dims, strict=True)):
            packed = (
                grad.shape[dim or 0] != self._records
            )  # its rows go to recurrent layers alone, which put them in order
            if not packed and not self._apart(sketch(grad, dim or 0), [echo[number] for echo in seeded]):
                raise mixed(tap)

    def _seeded(self, outputs: list[Tensor], grads: list[Tensor], dims: Dims, anchors: list[Tensor]) -> None:
        self._arrivals = {}
        if self._records < 2 or not outputs:
            self._trials = []
            return
        kind, device = outputs[0].dtype, outputs[0].device
        self._seeds = seed_passes(self._records, kind, device, self._number)
        self._trials = [Trial() for _ in self._seeds]
        for seeds, trial in zip(self._seeds, self._trials, strict=True):
            seeded = [_times(grad, seeds, dim) for grad, dim in zip(grads, dims, strict=True)]
            self._run(outputs, seeded, anchors, trial)

    def _apart(self, plain: Tensor, seeded: Iterable[Tensor]) -> bool:
        pairs = zip(seeded, self._seeds, strict=True)
        return all(impurity(plain, echo, seeds) <= IMPURE for echo, seeds in pairs)

    def _told(self, tap: Heard, grads: Sequence[Tensor], seeded: list[list[Tensor]]) -> Dims:
        """Along which dimension the records lie, of those of their number."""
        dims = []
        for number, (grad, guess) in enumerate(zip(grads, tap.out_dims, strict=True)):
            possible = [dim for dim, size in enumerate(grad.shape) if size == self._records]
            echoes = [echo[number] for echo in seeded]
            fit = [dim for dim in possible if self._apart(sketch(grad, dim), [sketch(echo, dim) for echo in echoes])]
            if not fit:
                raise mixed(tap)
            dims.append(guess if guess in fit else fit[0])
        return tuple(dims)

    def _refuse_whole_batch(self, entry: Entry, grads: list[Tensor], dims: Dims) -> None:
        """Rows of records and positions together may be in the order of the records; seeds then tell if they are."""
        for grad, dim in zip(grads, dims, strict=True):
            if dim is None and (grad.dim() == 0 or len(grad) % self._records != 0):
                raise Misuse(
                    f"the loss is computed from an output of {entry.name!r} that has no row for each record, such as a mean "
                    "over the batch: nothing tells what one record adds to it. Return one row per record, compute one "
                    "loss for each, and call private.backward(losses)."
                )


def _times(grad: Tensor, seeds: Tensor, dim: int | None) -> Tensor:
    """Every record's gradient times its seed. Where the records have no dimension of their own, each has as many rows."""
    rows = seeds.to(grad.dtype)
    if dim is None:
        rows, dim = rows.repeat_interleave(len(grad) // len(rows)), 0
    return grad * rows.view([-1 if k == dim else 1 for k in range(grad.dim())])


def mixed(tap: Heard) -> CliplessError:
    if tap.owner == ROOT and tap.entry is not None:
        return Misuse(
            f"what is computed from the output of {tap.entry.name!r} mixes the records: one's loss depends on others (a "
            "weighted mean, a mean over all tokens, contrastive pairs, a statistic of the batch). Give private.backward one "
            "loss per record, each of that record alone: reduction='none', and means over a record's own tokens."
        )
    return UnsupportedModule(
        f"at module {tap.owner!r} the gradient of one record depends on the loss of another, or belongs to one: records mix "
        "after it, or its rows are not in the order of the batch. Keep one row per record, in their order, in every tensor "
        "between the model's input and its losses."
    )


@contextmanager
def gradients_set_aside(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, these leaves have no `grad`; whatever is added there is forgotten."""
    leaves = list({id(tensor): tensor for tensor in tensors}.values())
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


def leaves_of(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """The leaves of the graph behind some tensors."""
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        fresh = {follower for follower, _ in node.next_functions if follower is not None} - seen
        seen |= fresh
        waiting += fresh
