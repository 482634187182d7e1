"""Checks on the whole function from batch to losses, which `private.step` is given.

Nothing between the batch and the losses is out of sight here: what the loop keeps from step to step, statistics between
modules, choices among records, weights from other labels. The function is called again without hooks, from the same random
state: on each half of the records in another order, on a few records one by one, and on a few that are collated again. Every
record must have the loss it had, and one half the gradients that the engine summed for it.

Random numbers are drawn for the whole batch. So that the same numbers meet the same rows, the others are replaced and not
left out where they are drawn; fewer rows and another order are then tried with constants in their place.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clipless.clipped import LossFunction
from clipless.errors import CliplessError
from clipless.gradients.checks import whole_messages as messages
from clipless.gradients.checks.calls_again import CallResult, CallsAgain
from clipless.gradients.checks.collated import refuse_collated
from clipless.gradients.checks.first_difference import NotedCall, first_difference, operations, short_path
from clipless.gradients.checks.plain import plain_gradients
from clipless.gradients.checks.reach import code_of, generators_of
from clipless.gradients.checks.seeds import shuffled, some_of
from clipless.gradients.checks.totals import (
    HALF_TOLERANCE,
    NEARLY,
    beyond_rounding,
    change,
    differing,
    groups_of,
)
from clipless.gradients.checks.weights import weights_moved
from clipless.random_state import Generator, random_state_restored, same_random_state
from clipless.sampling.loader import DrawnPart
from clipless.sampling.rows import BatchRows, placed_like, rows_of

# A record's loss that differs by more, relative, is another loss, unless rounding explains it; by more than the second it is
# refused even then.
DIFFERS, UNSTABLE = 1e-4, 1e-3
# The same call on the same numbers differs by no more.
SAME = 1e-6
# Rounding explains what changes by less than so many times what a rounding error in every weight changes.
EXPLAINED = 10.0
# So many records are run one by one.
FEW = 4
# With so many records in all places, at most, it is found out whether the number of random numbers depends on them.
FILLED = 8

Message = Callable[[str], CliplessError]
NamedParameters = Mapping[str, nn.Parameter]


class Repeated(NamedTuple):
    """A batch, what a call on it returned, and of that the losses of half of the records, if it is for them."""

    batch: Any
    found: CallResult
    losses: Tensor | None


class WholeStep:
    """One call of the function on one micro-batch, and what is needed to check it.

    `totals`, the engine's unclipped sums over the `judged` records (over all if that is None), are set when they are known;
    while they are None, gradients are not compared. `told` has the warnings that were given already.
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
        told: set[str],
    ) -> None:
        kept = () if drawn is None else (drawn.fetch.collate_fn, drawn.fetch.dataset)
        own = [*generators, *(generator for one in kept for generator in generators_of(one))]
        self._call, self._drawn, self._told = CallsAgain(function, model, batch, own), drawn, told
        self.records, self._number = records, number
        self._half = some_of(records, number)
        self._rows: BatchRows | None = None
        self._one: Repeated | None = None
        self._losses = torch.zeros(0)
        self.judged: Tensor | None = self._half if records > 1 else None
        self.totals: dict[str, Tensor] | None = None

    def returned(self, losses: Tensor) -> None:
        """The function has returned these losses, [b]."""
        self._losses = losses.detach()
        self._call.half |= losses.dtype.itemsize < 4
        self._call.returned()

    @property
    def blind(self) -> bool:
        """Whether the function returned before any pass was seen: those that come in the backward pass are checked apart."""
        return self.totals is None and len(self._losses) > 0

    def refuse(self, parameters: NamedParameters, live: NamedParameters) -> None:
        """Call the function again, and raise if it keeps state, mixes records, or has gradients that the engine lost. `live`
        are the objects that the model holds for the parameters now."""
        with random_state_restored(self._call.now(), self._call.generators):
            if self.records > 1:
                known = None if self._drawn is None else self._drawn.dims()
                self._rows = rows_of(self._call.batch, self.records, known)
            with torch.no_grad():
                seen = self._refuse_mixed()
            with torch.no_grad() if self.totals is None else torch.enable_grad():
                repeated = self._refuse_kept()
                if self.totals is not None:
                    self._refuse_lost(self.totals, repeated, parameters, None if live is parameters else live)
            with torch.no_grad():
                seen |= self._refuse_collated()
        if self.records > 1 and not seen and repeated.losses is None:
            self._warn(messages.UNSEEN_RECORDS)

    # Records stay apart.

    def _refuse_mixed(self) -> bool:
        """One half of the records again, and a few records one by one. Returns whether anything could be seen."""
        with self._call.noting_half():
            if self._rows is None:
                self._call.attempt(self._call.batch, self.records)
                return False
            seen = self._half_again(self._rows, ~self._half) is not None
        return self._refuse_alone(self._rows) or seen

    def _half_again(self, rows: BatchRows, half: Tensor) -> Repeated | None:
        """Half of the records by itself, in another order; where random numbers are drawn, in its places, with its records
        in the others' places, so that the same numbers meet it. Refused if it has other losses. None if that cannot be
        told."""
        if not self._call.random:
            kept = half.nonzero()[:, 0]
            kept = kept[shuffled(len(kept), self._number)]
            batch = rows.chosen(kept)
            found = self._call.attempt(batch, len(kept))
            if found is not None and not found.random:
                self._compare_records(found.losses, kept, self._swapped(rows, half))
                return Repeated(batch, found, found.losses)
        batch, kept = self._swapped(rows, half), half.nonzero()[:, 0]
        found = self._call.attempt(batch, self.records)
        if found is None or not found.as_many:
            return None
        losses = found.losses[kept.to(found.losses.device)]
        before = self._losses[kept.to(losses.device)]
        if self._call.random and change(before, losses.detach()) > DIFFERS and self._draws_depend_on_records():
            return None
        self._compare_records(losses, kept, batch)
        return Repeated(batch, found, losses)

    def _compare_records(self, losses: Tensor, kept: Tensor, other: Any) -> None:
        self._compare(self._losses[kept.to(losses.device)], losses, messages.depends_on_others, other, kept)

    def _swapped(self, rows: BatchRows, half: Tensor) -> Any:
        """The batch with records of one half in the places of the others, one of them in most."""
        kept, everyone = half.nonzero()[:, 0], torch.arange(self.records)
        return rows.chosen(torch.where(half, everyone, kept[everyone.div(3, rounding_mode="floor") % len(kept)]))

    def _draws_depend_on_records(self) -> bool:
        """Whether the function draws another number of random numbers for other records."""
        assert self._rows is not None
        for k in range(min(self.records, FILLED)):
            outcome = self._call.attempt(self._rows.chosen(torch.full((self.records,), k)), self.records)
            if outcome is None or not outcome.as_many:
                return True
        return False

    def _refuse_alone(self, rows: BatchRows) -> bool:
        """A few records one by one; where random numbers are drawn, with constants for them, and then half of the records,
        too. Returns whether that could be seen."""
        calm, expected = self._call.random, self._losses
        order = shuffled(self.records, self._number)
        if calm:
            base = self._call.attempt(self._call.batch, self.records, calm)
            if base is None or base.random:
                return False
            expected = base.losses
        for chosen in [*order[:FEW].split(1), *([order[self.records // 2 :]] if calm else [])]:
            batch = rows.chosen(chosen)
            found = self._call.attempt(batch, len(chosen), calm)
            if found is not None and not found.random:
                before = expected[chosen.to(expected.device)]
                self._compare(before, found.losses, messages.depends_on_others, None, chosen)
                self._one = Repeated(batch, found, None) if not calm else None
        return True

    # Nothing is kept, and no gradient is lost.

    def _refuse_kept(self) -> Repeated:
        """Half of the records again, or all if these cannot be told apart, and one call twice: refused if the losses are
        others than at first, or if the second call returns others than the first."""
        repeated = None if self._rows is None else self._half_again(self._rows, self._half)
        if repeated is None:
            found = self._call.attempt(self._call.batch, self.records)
            if found is None:
                raise messages.keeps_state(self._place())
            self._compare(self._losses, found.losses, messages.keeps_state, None, None)
            repeated = Repeated(self._call.batch, found, None)
        once = repeated if self._one is None else self._one
        with torch.set_grad_enabled(once.found.losses.requires_grad):
            twice = self._call.attempt(once.batch, len(once.found.losses))
        if twice is None or self._changed(once.found.losses, twice.losses):
            raise messages.keeps_state(self._where_kept())
        return repeated

    def _changed(self, once: Tensor, twice: Tensor) -> bool:
        return change(once.detach(), twice.detach()) > (DIFFERS if self._call.half or once.is_cuda else SAME)

    def _refuse_lost(
        self,
        totals: Mapping[str, Tensor],
        repeated: Repeated,
        parameters: NamedParameters,
        gathered: NamedParameters | None,
    ) -> None:
        """Raise if the sums over the judged records are not what plain autograd gives for them."""
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        losses, mask = repeated.losses, None
        if losses is None:
            losses, mask = repeated.found.losses, self.judged
        elif self.judged is None:
            losses = self._call(self._call.batch).losses

        def lost(losses: Tensor, mask: Tensor | None) -> dict[str, float]:
            weights = torch.ones_like(losses) if mask is None else mask.to(losses)
            plain = plain_gradients([losses], [weights], trained, gathered)
            return differing(totals, plain, trained, self._call.half, 0.0)

        found = lost(losses, mask)
        if found and repeated.losses is not None and gathered is None and max(found.values()) <= NEARLY:
            assert self._rows is not None  # rounded differently with fewer rows, next to a kink
            again = self._call.attempt(self._swapped(self._rows, self._half), self.records)
            if again is not None and self.judged is not None:
                losses, mask = again.losses, self.judged
                found = lost(losses, mask)
        names = list(found)
        if names and self._call.half and gathered is None:
            numbers = torch.arange(len(losses)) if mask is None else mask.nonzero()[:, 0].cpu()
            weights = (torch.zeros_like(losses).index_fill(0, g.to(losses.device), 1.0) for g in groups_of(numbers))
            names = beyond_rounding(
                names, totals, (plain_gradients([losses], [weight], trained, None) for weight in weights)
            )
        for name in names:
            raise messages.lost_gradient(name)

    # Collated again.

    def _refuse_collated(self) -> bool:
        """Raise if records have other losses when they are collated alone. Returns whether half of all records was."""
        drawn, opaque = self._drawn, self._rows is None
        if drawn is None or not (drawn.mixes or opaque):
            return False
        if drawn.mixes:
            refuse_collated(self, drawn)
        return opaque and self.records > 1 and self._refuse_halves(drawn)

    def _refuse_halves(self, drawn: DrawnPart) -> bool:
        """Collate all records again, and each half of them. Refused if their losses differ. Returns whether that could be
        seen."""
        try:
            samples = drawn.samples() or []
            halves = [[s for s, own in zip(samples, half, strict=True) if own] for half in (self._half, ~self._half)]
            before = self._call.now()
            batches = [self.placed(drawn.collate(group)) for group in (samples, *halves)]
        except Exception:
            return False
        sizes = map(len, (samples, *halves))
        found = [self.losses(batch, size) for batch, size in zip(batches, sizes, strict=True) if batch is not None]
        losses = [one for one in found if one is not None]
        if len(losses) < 3 or not same_random_state(before, self._call.now()):
            return False
        together, separate = losses[0].sort().values, torch.cat(losses[1:]).sort().values
        self._compare(together, separate, messages.depends_on_others, None, None)
        self._compare(separate, together, messages.depends_on_others, None, None)
        return True

    @property
    def model(self) -> nn.Module:
        """The model that the function is given."""
        return self._call.model

    def placed(self, batch: Any) -> Any:
        """A batch with its tensors on the devices of the first one's; None if it is built otherwise."""
        return placed_like(batch, self._call.batch)

    def losses(self, batch: Any, records: int) -> Tensor | None:
        """The losses of other records, with constants for random numbers; None if the function does not take them, or draws
        random numbers all the same."""
        outcome = self._call.attempt(batch, records, calm=self._call.random)
        return None if outcome is None or outcome.random else outcome.losses

    def differ(self, expected: Tensor, found: Tensor) -> bool:
        """Whether losses differ by more than rounding explains."""
        drift = change(expected.detach(), found.detach())
        return drift > (HALF_TOLERANCE if self._call.half else DIFFERS) and drift > EXPLAINED * self._rounding()

    def refuse_as(self, message: Message) -> None:
        """Raise, as this or as a function that keeps state."""
        keeps = self._keeps_state(max(HALF_TOLERANCE if self._call.half else DIFFERS, EXPLAINED * self._rounding()))
        raise messages.keeps_state(self._where_kept()) if keeps else message(self._place())

    # Differences.

    def _compare(self, expected: Tensor, found: Tensor, message: Message, other: Any, kept: Tensor | None) -> None:
        """Raise unless the losses are the same, or rounding explains the difference. `other` is a batch of the same size in
        which the `kept` records have their places, to find out where the difference arises."""
        drift, tolerance = change(expected.detach(), found.detach()), HALF_TOLERANCE if self._call.half else DIFFERS
        if drift <= tolerance:
            return
        rounding = EXPLAINED * self._rounding()
        if drift <= rounding:
            if drift <= UNSTABLE or self._call.half:
                return
            keeps = self._keeps_state(math.inf)  # which moves the losses too, when the weights do
            raise messages.keeps_state(self._where_kept()) if keeps else messages.unstable(self._place())
        if message is messages.keeps_state or self._keeps_state(max(tolerance, rounding)):
            raise messages.keeps_state(self._where_kept())
        raise message(self._where(other, kept))

    @torch.no_grad()
    def _keeps_state(self, tolerance: float) -> bool:
        """Whether calls on the same batch return other losses."""
        once, twice = (self._call.attempt(self._call.batch, self.records) for _ in range(2))
        if once is None or twice is None or self._changed(once.losses, twice.losses):
            return True
        return change(self._losses, once.losses) > tolerance

    @torch.no_grad()
    def _rounding(self) -> float:
        """How far the losses move when every weight moves by its rounding error; zero if that cannot be told, as where they
        move by themselves."""
        base, again = (self._call.attempt(self._call.batch, self.records) for _ in range(2))
        if base is None or again is None or self._changed(base.losses, again.losses):
            return 0.0
        with weights_moved(self._call.model):
            moved = self._call.attempt(self._call.batch, self.records)
        return 0.0 if moved is None else change(base.losses, moved.losses)

    @torch.no_grad()
    def _where(self, other: Any, kept: Tensor | None) -> str:
        """The line at which the rows of the kept records first differ, in words; the function's if that cannot be told."""
        if other is None or kept is None:
            return self._place()
        ours, theirs = self._noted(self._call.batch), self._noted(other)
        return first_difference(ours, theirs, kept) or self._place()

    @torch.no_grad()
    def _where_kept(self) -> str:
        """The line at which two calls on the same batch, with one on others between them, first differ."""
        ours = self._noted(self._call.batch)
        if self._rows is not None:
            self._call.attempt(self._swapped(self._rows, self._half), self.records)
        return first_difference(ours, self._noted(self._call.batch), None) or self._place()

    def _noted(self, batch: Any) -> list[NotedCall]:
        return operations(partial(self._call, batch), self.records)

    def _place(self) -> str:
        """Where the function is defined; nothing if it is one of clipless' own."""
        code = code_of(self._call.function)
        own = str(getattr(inspect.unwrap(self._call.function), "__module__", "")).partition(".")[0] == "clipless"
        return "" if code is None or own else f" ({code.co_name}, {short_path(code.co_filename)}:{code.co_firstlineno})"

    def _warn(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            warnings.warn(message, stacklevel=2)
