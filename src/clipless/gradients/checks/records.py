"""The checks that a training run makes on its own model, loss and batch: records stay apart, and no gradient is lost.

Both look at the user's own forward pass. *Records*: before the gradients are used, backward passes with seeds (see seeds.py)
go through the same graph, from the losses if these are known one by one, else from the gradient at the model's output.
*Totals*: the engine's sums over the records, without clipping, are those that plain autograd gives for the same outputs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from clipless.errors import CliplessError, Misuse, UnsupportedModule
from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.checks.seeds import IMPURE, impurity, named_records, seed_passes, sketch, some_of
from clipless.gradients.checks.trial import Heard, Trial, tap_key, tap_sketch
from clipless.gradients.trees import Dims

ROOT = "(output)"


class RecordsCheck:
    """The checks on one part of a batch. `run` is the receiver's: a backward pass whose gradients go to a trial. If it
    `names_rows`, there are taps whose rows are not the records, and seeds tell the record of each row."""

    def __init__(self, records: int, number: int, run: Callable[..., None]) -> None:
        self.at_losses = self.names_rows = False
        self._named = True
        self.forward_passes: list[ForwardPass] = []
        self._records, self._number, self._run = records, number, run
        self._seeds: list[Tensor] = []
        self._trials: list[Trial] = []
        self._positions: Trial | None = None
        self._arrivals: dict[tuple[int, str], int] = {}

    def seed_losses(self, losses: Tensor, once: bool = False) -> None:
        """Run the seeded passes from the losses of the records. `once`, a single pass, is enough where the records are told
        apart by other calls as well, unless seeds must name the records of rows."""
        self.at_losses = True
        self._seeded([losses], [torch.ones_like(losses)], (0,), self._anchors(), once)

    def add_up(self, losses: Tensor, judged: Tensor | None, totals: dict[str, Tensor]) -> Tensor | None:
        """Add up the gradients of the judged records, unclipped, over all passes; call it after `seed_losses`. Returns the
        records that were judged: None for all of them, where nothing has told yet where records lie."""
        told = None if self._records < 2 or any(trial.unsure for trial in self._trials) else judged
        self._arrivals = {}
        self._run([losses], [torch.ones_like(losses)], self._anchors(), Trial(totals=totals, judged=told))
        self._arrivals = {}
        return told

    def _anchors(self) -> list[Tensor]:
        """Those of all passes: one may go on from another's output."""
        return [forward_pass.anchor for forward_pass in self.forward_passes]

    def at_output(self, forward_pass: ForwardPass, grads: tuple[Tensor | None, ...]) -> None:
        """The gradients of the outermost module's output have arrived, and go no further before this returns."""
        pairs = [(out, grad) for out, grad in zip(forward_pass.outputs, grads, strict=True) if grad is not None]
        outputs, arrived = [out for out, _ in pairs], [grad.detach() for _, grad in pairs]
        if not self.at_losses:
            dims = tuple(dim for dim, grad in zip(forward_pass.out_dims, grads, strict=True) if grad is not None)
            forward_pass.loss_inside = bool(arrived) and all(grad.dim() == 0 for grad in arrived)
            if not forward_pass.loss_inside:
                self._refuse_whole_batch(forward_pass, arrived, dims)
                self._seeded(outputs, arrived, dims, self._anchors())
                self._seed_positions(forward_pass, outputs, arrived)
        if self._records > 1 and all(dim is not None for dim in forward_pass.out_dims):
            unsure = any(trial.unsure for trial in self._trials)
            forward_pass.judged = None if unsure else some_of(self._records, self._number)
        if forward_pass.rerun is not None or not self.at_losses:
            arrivals, self._arrivals = self._arrivals, {} if self.at_losses else self._arrivals
            self._run(outputs, arrived, self._anchors(), Trial(forward_pass))
            self._arrivals = arrivals
        if self._positions is not None:
            raise Misuse(
                f"the input and the output of {forward_pass.name!r} have as many numbers along their second dimension "
                "as there are records in the first batch, and nothing tells which of them are the records. Call "
                "private.backward(losses) with one loss per record, which tells."
            )
        forward_pass.grads = tuple(None if grad is None else grad.detach() for grad in grads)

    def _seed_positions(self, forward_pass: ForwardPass, outputs: list[Tensor], grads: list[Tensor]) -> None:
        """Where the first batch is square, seed what may be positions as well: if they too stay apart everywhere, nothing
        tells which are the records."""
        self._positions = None
        if forward_pass.square and self._trials and all(self._is_square(grad) for grad in grads):
            self._positions = Trial(whole=True)
            seeded = [_times(grad, self._seeds[0], 1) for grad in grads]
            self._run(outputs, seeded, self._anchors(), self._positions)

    def _is_square(self, grad: Tensor) -> bool:
        return grad.shape[:2] == (self._records, self._records)

    def _refute_positions(self, tap: Heard, grads: Sequence[Tensor], place: int) -> None:
        assert self._positions is not None
        echoes = self._positions.echoes.get(tap_key(tap), [])
        if place >= len(echoes) or not (tap.rows or all(self._is_square(grad) for grad in grads)):
            self._positions = None
            return
        pairs = zip(grads, echoes[place], strict=True)
        if tap.rows:
            sketches = [
                (tap_sketch(tap, grad, dim), tap_sketch(tap, echo, dim))
                for (grad, echo), dim in zip(pairs, tap.out_dims, strict=True)
            ]
            if any(named_records(grad, [echo], self._seeds[:1]) is None for grad, echo in sketches):
                self._positions = None
            return
        if any(impurity(sketch(grad, 1), sketch(echo, 1), self._seeds[0]) > IMPURE for grad, echo in pairs):
            self._positions = None

    def compare(self, tap: Heard, grads: Sequence[Tensor]) -> None:
        """The gradients that arrived at a tap, beside those of the seeded passes; refused if records are not apart."""
        if tap.rows and tap.record is None and self._records == 1:
            tap.record = torch.zeros(tap.rows, dtype=torch.long, device=grads[0].device)
        if not self._trials:
            return
        key = tap_key(tap)
        place = self._arrivals[key] = self._arrivals.get(key, -1) + 1
        echoes = [trial.echoes.get(key, ()) for trial in self._trials]
        if any(place >= len(echo) for echo in echoes):
            return
        seeded = [echo[place] for echo in echoes]
        if self._positions is not None:
            self._refute_positions(tap, grads, place)
        if tap.rows:
            tap.record = self._name(tap, grads, seeded)
            return
        if tap.unsure:
            tap.settle(self._told(tap, grads, seeded))
            return
        for number, (grad, dim) in enumerate(zip(grads, tap.out_dims, strict=True)):
            if self._apart(sketch(grad, dim or 0), [echo[number] for echo in seeded]):
                continue
            if not self.names_rows or tap.owner == ROOT:
                raise mixed(tap)
            tap.rows = self._records  # routed rows, by chance as many as there are records
            tap.record = self._name(tap, grads, seeded)
            return

    def _name(self, tap: Heard, grads: Sequence[Tensor], seeded: list[list[Tensor]]) -> Tensor:
        """The record of each row, told by the seeds; refused if a row belongs to several."""
        if not self._named:
            raise Misuse(
                f"at module {tap.owner!r} records and positions lie in one dimension, and so they do in the output that the "
                "loss is computed from: nothing tells which rows are whose. Call private.backward(losses) with one loss "
                "per record, which tells."
            )
        record = torch.full((tap.rows,), -1, dtype=torch.long, device=grads[0].device)
        for number, (grad, dim) in enumerate(zip(grads, tap.out_dims, strict=True)):
            found = named_records(tap_sketch(tap, grad, dim), [echo[number] for echo in seeded], self._seeds)
            if found is None or bool(((found != record) & (found >= 0) & (record >= 0)).any()):
                raise mixed(tap)
            record = torch.where(record < 0, found, record)
        return record

    def _seeded(
        self, outputs: list[Tensor], grads: list[Tensor], dims: Dims, anchors: list[Tensor], once: bool = False
    ) -> None:
        self._arrivals = {}
        if self._records < 2 or not outputs:
            self._trials = []
            return
        kind, device = outputs[0].dtype, outputs[0].device
        self._named = all(dim is not None for dim in dims)
        self._seeds = seed_passes(self._records, kind, device, self._number, naming=self.names_rows)
        self._seeds = self._seeds[:1] if once and not self.names_rows else self._seeds
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

    def _refuse_whole_batch(self, forward_pass: ForwardPass, grads: list[Tensor], dims: Dims) -> None:
        """Rows of records and positions together may be in the order of the records; seeds then tell if they are."""
        for grad, dim in zip(grads, dims, strict=True):
            if dim is None and (grad.dim() == 0 or len(grad) % self._records != 0):
                raise Misuse(
                    f"the loss is computed from an output of {forward_pass.name!r} that has no row for each record, "
                    "such as a mean over the batch: nothing tells what one record adds to it. Return one row per "
                    "record, compute one loss for each, and call private.backward(losses)."
                )


def _times(grad: Tensor, seeds: Tensor, dim: int | None) -> Tensor:
    """Every record's gradient times its seed. Where the records have no dimension of their own, each has as many rows."""
    rows = seeds.to(grad.dtype)
    if dim is None:
        rows, dim = rows.repeat_interleave(len(grad) // len(rows)), 0
    return grad * rows.view([-1 if k == dim else 1 for k in range(grad.dim())])


def mixed(tap: Heard) -> CliplessError:
    if tap.owner == ROOT and tap.forward_pass is not None:
        return Misuse(
            f"what is computed from the output of {tap.forward_pass.name!r} mixes the records: one's loss depends on "
            "others (a weighted mean, a mean over all tokens, contrastive pairs, a statistic of the batch). Give "
            "private.backward one loss per record, each of that record alone: reduction='none', and means over a "
            "record's own tokens."
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
