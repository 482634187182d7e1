"""Checks on the whole function from batch to losses, which `private.step` is given.

Nothing between the batch and the losses is out of sight here: what the loop keeps from step to step, statistics between
modules, choices among records, weights from other labels. The function is run again without hooks, from the same random
state: on the same batch, on each half of the records, in another order, and on a few of the records collated again. Every
record must have the losses it had, and half of the records the gradients that the engine summed for them.

Where random numbers are drawn, other records take the places of those left out, so that the same numbers meet the same rows;
fewer rows and another order are then tried in evaluation mode.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipless.clipped import LossFunction
from clipless.errors import CliplessError
from clipless.gradients.checks import whole_messages as messages
from clipless.gradients.checks.first_difference import first_difference, operations, short_path
from clipless.gradients.checks.passes import Rerun
from clipless.gradients.checks.plain import plain_gradients
from clipless.gradients.checks.seeds import shuffled, some_of
from clipless.gradients.checks.totals import HALF_TOLERANCE, NEARLY, change, differing, weights_moved
from clipless.gradients.records import TROUBLES
from clipless.random_state import Generator, same_random_state
from clipless.sampling.loader import DrawnPart
from clipless.sampling.rows import BatchRows, copied, placed_like, rows_of

# A record's loss that differs by more, relative, is another loss, unless rounding explains it; by more than the second it is
# refused even then.
DIFFERS, UNSTABLE = 1e-4, 1e-3
# The same call on the same numbers differs by no more.
SAME = 1e-6
# Rounding explains what changes by less than so many times what a rounding error in every weight changes.
EXPLAINED = 10.0
# So many samples are collated again: the shortest, the longest, and others.
FEW = 4

Message = Callable[[str], CliplessError]
NamedParameters = Mapping[str, nn.Parameter]


class WholeStep:
    """One call of the function on one micro-batch, and what is needed to check it.

    `losses` [b] and `totals`, the engine's unclipped sums over the `judged` records (all of them if that is None), are set
    when they are known.
    """

    def __init__(
        self,
        function: LossFunction,
        model: nn.Module,
        batch: Any,
        records: int,
        number: int,
        drawn: DrawnPart | None,
        generators: Sequence[Generator],
    ) -> None:
        self._function, self._model, self._batch, self._drawn = function, model, copied(batch), drawn
        self.records, self._number = records, number
        self._circumstances = Rerun.of(model, ((), {}), generators)
        self._random = bool(generators)
        self._half = any(parameter.dtype.itemsize < 4 for parameter in model.parameters())
        self._half |= self._circumstances.autocast[1]
        self.judged: Tensor | None = some_of(records, number) if records > 1 else None
        self.losses = torch.zeros(0)
        self.totals: dict[str, Tensor] = {}

    def refuse(self, parameters: NamedParameters | None, live: NamedParameters | None = None) -> None:
        """Run the function again, and raise if it keeps state, mixes records, or has gradients that the engine lost; without
        `parameters`, gradients are not compared. `live` are the objects that the model holds for them now, where these
        are others."""
        self.judged = self.judged if parameters is not None else None
        with torch.no_grad():
            base, self._random = self._run(self._batch)
            self._half |= base.dtype.itemsize < 4
            self._refuse_state(base)
            known = None if self._drawn is None else self._drawn.dims()
            rows = rows_of(self._batch, self.records, known) if self.records > 1 else None
            if rows is not None:
                self._refuse_mixed(base, rows)
        if parameters is not None:
            with torch.enable_grad():
                self._refuse_lost(base, rows, parameters, None if live is parameters else live)
        with torch.no_grad():
            self._refuse_collated()

    # Nothing is kept.

    def _refuse_state(self, base: Tensor) -> None:
        """Two more calls on the same batch: the first is compared with the call that the engine saw, which may be rounded
        differently, the second with the first."""
        again, _ = self._run(self._batch)
        if again.shape != base.shape or change(base, again) > (DIFFERS if self._half or base.is_cuda else SAME):
            raise messages.keeps_state(self._where(self._batch, None))
        self._compare(self.losses, base, messages.keeps_state, self._batch, None)

    # Records stay apart.

    def _refuse_mixed(self, base: Tensor, rows: BatchRows) -> None:
        some = some_of(self.records, self._number)
        for half in (
            (~some, some) if self.judged is None else (~some,)
        ):  # the judged half has its gradients compared too
            self._compare_half(base, rows, half, self._random)
        if self._random:
            calm, random = self._run(self._batch, evaluate=True)
            if not random:
                self._compare_half(calm, rows, some, False, evaluate=True)

    def _compare_half(
        self, base: Tensor, rows: BatchRows, half: Tensor, in_place: bool, evaluate: bool = False
    ) -> Tensor | None:
        """The losses of half of the records, [n], without the others or with these in the others' places; refused if they
        are not those of `base`. None if they cannot be told."""
        kept = self._shuffled(half)
        losses = None
        if not in_place:
            losses = self._attempt(rows.chosen(kept), len(kept), evaluate, drew=False)
        taken, in_place = kept, losses is None
        if losses is None:
            taken = self._in_others_places(half)
            losses = self._attempt(rows.chosen(taken), self.records, evaluate)
            losses = None if losses is None else losses[half.to(losses.device)]
            kept = half.nonzero()[:, 0]
        if losses is not None:
            expected = base[kept.to(base.device)]
            self._compare(expected, losses, messages.depends_on_others, rows.chosen(self._in_others_places(half)), kept)
        return losses

    def _shuffled(self, half: Tensor) -> Tensor:
        kept = half.nonzero()[:, 0]
        return kept[shuffled(len(kept), self._number)]

    def _in_others_places(self, half: Tensor) -> Tensor:
        """For each row a record of this half: itself, or one in another's place."""
        kept, everyone = half.nonzero()[:, 0], torch.arange(self.records)
        return torch.where(half, everyone, kept[everyone % len(kept)])

    # No gradient is lost.

    def _refuse_lost(
        self, base: Tensor, rows: BatchRows | None, parameters: NamedParameters, gathered: NamedParameters | None
    ) -> None:
        """Raise if the sums over the judged records are not what plain autograd gives for them."""
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        losses = None
        if rows is not None and self.judged is not None:
            losses = self._compare_half(base, rows, self.judged, self._random)
        lost = self._lost(losses, None, trained, gathered)
        if lost and losses is not None and gathered is None and rows is not None and max(lost.values()) <= NEARLY:
            assert self.judged is not None  # rounded otherwise with fewer rows, next to a kink
            taken = self._in_others_places(self.judged)
            again = self._attempt(rows.chosen(taken), self.records)
            if again is not None:
                lost = self._lost(again, self.judged, trained, gathered)
        for name in lost:
            raise messages.lost_gradient(name)

    def _lost(
        self, losses: Tensor | None, mask: Tensor | None, trained: NamedParameters, gathered: NamedParameters | None
    ) -> dict[str, float]:
        if losses is None:
            losses, _ = self._run(self._batch)
            mask = self.judged
        weights = torch.ones_like(losses) if mask is None else mask.to(losses)
        plain = plain_gradients([losses], [weights], trained, gathered)
        return differing(self.totals, plain, trained, self._half, 0.0)

    # Collated again.

    def _refuse_collated(self) -> None:
        """Collate a few records together and each alone; refused if they have other losses."""
        samples = None if self._drawn is None else self._drawn.samples()
        if self._drawn is None or samples is None or len(samples) < 2:
            return
        few = _extremes(samples)
        batches = self._collated([few, *([sample] for sample in few)])
        if batches is None:
            return
        for evaluate in (False, True):
            found = [
                self._attempt(batch, 1 if k else len(few), evaluate, drew=False) for k, batch in enumerate(batches)
            ]
            together, alone = found[0], found[1:]
            if together is not None and all(loss is not None for loss in alone):
                separate = torch.cat([loss for loss in alone if loss is not None])
                pairs = separate.sort().values, together.sort().values
                self._compare(*pairs, messages.collated_with_others, None, None)
                return
            if not self._random:
                return

    def _collated(self, groups: list[list[Any]]) -> list[Any] | None:
        """Groups of samples, each collated; None if they are not built like the batch, or if collating is random."""
        assert self._drawn is not None
        before = self._circumstances.now()
        try:
            batches = [placed_like(self._drawn.collate(group), self._batch) for group in groups]
        except Exception:
            return None
        if not same_random_state(before, self._circumstances.now()):
            warnings.warn(
                "The collate function draws random numbers, so clipless cannot see whether padding or a statistic in it "
                "tells one record about the others. Draw random numbers in record_losses or in the data set instead.",
                stacklevel=2,
            )
            return None
        return None if any(batch is None for batch in batches) else batches

    # Running the function again.

    def _run(self, batch: Any, evaluate: bool = False) -> tuple[Tensor, bool]:
        """The losses of a batch, from the random state of the first call, and whether random numbers were drawn."""

        def call() -> tuple[Tensor, bool]:
            before = self._circumstances.now()
            losses = self._function(self._model, copied(batch))
            return losses, bool(self._circumstances.generators) or not same_random_state(
                before, self._circumstances.now()
            )

        return self._circumstances(evaluate=evaluate, run=call)[0]

    def _attempt(self, batch: Any, records: int, evaluate: bool = False, drew: bool | None = None) -> Tensor | None:
        """The losses of other records; None if the function does not take them, or if random numbers are drawn and should
        not be."""
        try:
            losses, random = self._run(batch, evaluate)
        except TROUBLES:
            return None
        fits = isinstance(losses, Tensor) and losses.shape == (records,)
        return losses if fits and drew in (None, random) else None

    def _compare(self, expected: Tensor, found: Tensor, message: Message, other: Any, kept: Tensor | None) -> None:
        """Raise unless the losses are the same, or rounding explains the difference. `other` is a batch of the same size in
        which the `kept` records have their places, to find out where the difference arises."""
        drift = change(expected.detach(), found.detach())
        if drift <= (HALF_TOLERANCE if self._half else DIFFERS):
            return
        if drift <= EXPLAINED * self._rounding():
            if drift <= UNSTABLE or self._half:
                return
            raise messages.unstable(self._place())
        raise message(self._where(other, kept))

    def _rounding(self) -> float:
        """How far the losses move when every weight moves by its rounding error; zero if that cannot be told."""
        try:
            with torch.no_grad():
                base, _ = self._run(self._batch)
                with weights_moved(self._model):
                    moved, _ = self._run(self._batch)
        except TROUBLES:
            return 0.0
        return change(base, moved)

    def _where(self, other: Any, kept: Tensor | None) -> str:
        """The line at which the rows of the kept records first differ, in words; the function's own if that cannot be told.
        Without `kept` everything is compared."""
        if other is None:
            return self._place()
        ours, theirs = (operations(partial(self._run, batch), self.records) for batch in (self._batch, other))
        everyone = torch.arange(self.records)
        return first_difference(ours, theirs, everyone if kept is None else kept, kept is None) or self._place()

    def _place(self) -> str:
        code = getattr(getattr(self._function, "__func__", self._function), "__code__", None)
        return "" if code is None else f" ({code.co_name}, {short_path(code.co_filename)}:{code.co_firstlineno})"


def _extremes(samples: list[Any]) -> list[Any]:
    """The shortest and the longest of some samples, and others in between."""
    by_size = sorted(samples, key=_size)
    places = [k * (len(by_size) - 1) // (FEW - 1) for k in range(FEW)]
    return [by_size[place] for place in sorted(set(places))]


def _size(sample: Any) -> int:
    """How long a sample is: the numbers in its tensors, arrays and strings."""
    if isinstance(sample, Mapping):
        return sum(map(_size, sample.values()))
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, tuple | list):
        return len(sample) + sum(map(_size, sample))
    size = getattr(sample, "size", None)
    return sample.numel() if isinstance(sample, Tensor) else size if isinstance(size, int) else 0
