"""Does a record's loss depend on the records that it is collated with: by padding, a statistic, an order, a mixture?

A few records are collated again, together and each with a copy of itself. Where that gives the same rows, nothing depends on
anything. Otherwise the losses decide, at the given weights and at others, where none is the same by chance.

A collate function that draws random numbers gives every call other rows. Called twice from the same random state, with some
of its records replaced by copies of the others, it must leave those others the losses they had. Its padding is judged in
one batch: a record must have the same loss when its row is cut down to the length that it has alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from clipless.errors import CliplessError
from clipless.gradients.checks import whole_messages as messages
from clipless.gradients.checks.reach import generators_of
from clipless.gradients.checks.weights import weights_shaken
from clipless.random_state import nothing_drawn, random_state_of, set_random_state
from clipless.sampling.loader import DrawnPart
from clipless.sampling.rows import alike, cut, rows_of, shapes_in
from clipless.sampling.sizes import size_of

# So many records of a part are collated again; so many sets of weights are tried besides the given ones; a collate function
# that draws random numbers is tried so many times.
FEW, SHAKEN, DRAWS = 4, 1, 3


class Repeatable(Protocol):
    """A function from batch to losses that can be called again."""

    @property
    def model(self) -> nn.Module: ...

    def placed(self, batch: Any) -> Any:
        """A batch like the one it was called with; None if it is built otherwise."""

    def losses(self, batch: Any, records: int) -> Tensor | None:
        """The losses of other records; None if it does not take them, or if they depend on random numbers."""

    def differ(self, expected: Tensor, found: Tensor) -> bool:
        """Whether losses differ by more than rounding explains."""

    def refuse_as(self, message: Callable[[str], CliplessError]) -> None:
        """Raise, as this or as a function that keeps state."""


def refuse_collated(step: Repeatable, drawn: DrawnPart) -> None:
    """Raise if the losses of some records depend on what they are collated with, or if that cannot be told. Changes the
    random state."""
    try:
        numbers = drawn.few(FEW)
        few = drawn.samples(numbers) if len(numbers) > 1 else None
    except Exception as failed:
        raise messages.not_fetched(type(failed).__name__) from failed
    if few is not None:
        CollatedAgain(step, drawn, numbers, few).refuse()


class CollatedAgain:
    """A few records of one micro-batch, and others, collated again."""

    def __init__(self, step: Repeatable, drawn: DrawnPart, numbers: Tensor, few: list[Any]) -> None:
        self._step, self._drawn = step, drawn
        by_size = torch.tensor([size_of(sample) for sample in few]).argsort()
        self._few = [few[k] for k in by_size.tolist()]
        self._numbers = numbers[by_size]
        self._generators = generators_of(drawn.fetch.collate_fn)
        self._state = self._after = random_state_of((), self._generators)
        self._random = False

    def refuse(self) -> None:
        """Raise if it matters what a record is collated with."""
        together = self._collated(self._fetched_together())
        alone = [self._collated([sample, sample]) for sample in self._few]
        if self._random:
            self._refuse_exchanged(alone)
        elif not self._same_rows(together, alone):
            self._refuse_other_losses(together, alone)

    def _fetched_together(self) -> list[Any]:
        """The records, fetched together; as they were fetched one by one if fetching draws random numbers."""
        before = random_state_of((), ())
        found = self._drawn.samples(self._numbers, together=True)
        return self._few if found is None or not nothing_drawn(before, random_state_of((), ())) else found

    def _collated(self, samples: Sequence[Any]) -> Any:
        """Samples as a batch, always from the same random state."""
        set_random_state(self._state, self._generators)
        try:
            batch = self._drawn.collate(list(samples))
        except Exception as failed:
            raise messages.not_collated(f"it raises {type(failed).__name__} on a few records") from failed
        self._after = random_state_of((), self._generators)
        self._random |= not nothing_drawn(self._state, self._after)
        return batch

    def _same_rows(self, together: Any, alone: list[Any]) -> bool:
        dims = self._drawn.dims()
        ours, theirs = rows_of(together, len(self._few), dims), [rows_of(batch, 2, dims) for batch in alone]
        return ours is not None and all(
            rows is not None and alike(ours.chosen(torch.tensor([k])), rows.chosen(torch.tensor([0])))
            for k, rows in enumerate(theirs)
        )

    # Losses, where nothing random is drawn.

    def _refuse_other_losses(self, together: Any, alone: list[Any]) -> None:
        whole, *pairs = map(self._placed, (together, *alone))
        for number in range(SHAKEN + 1):
            with self._weights(number):
                expected = self._losses(whole, len(self._few))
                separate = torch.cat([self._losses(pair, 2)[:1] for pair in pairs])
                # A collate function may put the records in an order of its own.
                differ = self._differ(expected.sort().values, separate.sort().values)
            if differ:
                again = self._placed(self._collated(self._fetched_together()))
                if self._differ(*(self._losses(batch, len(self._few)) for batch in (whole, again))):
                    raise messages.collates_at_random()
                self._step.refuse_as(messages.collated_with_others)

    def _losses(self, batch: Any, records: int) -> Tensor:
        losses = self._step.losses(batch, records)
        if losses is None:
            raise messages.not_collated(
                "record_losses fails on a few records, or draws random numbers other than torch's for padded records"
            )
        return losses

    def _differ(self, one: Tensor, other: Tensor) -> bool:
        """Numbers that are not finite are compared with nothing, so both sides are."""
        return self._step.differ(one, other) or self._step.differ(other, one)

    def _weights(self, number: int) -> AbstractContextManager[None]:
        """The given weights, or others."""
        return weights_shaken(self._step.model, number) if number else nullcontext()

    def _placed(self, batch: Any) -> Any:
        placed = self._step.placed(batch)
        if placed is None:
            raise messages.not_collated("what private.step got is not built like what the loader yields")
        return placed

    # A collate function that draws random numbers.

    def _refuse_exchanged(self, alone: list[Any]) -> None:
        """The longest record comes first, then the shortest: as many as are kept when the others are replaced."""
        order = [len(self._few) - 1, *range(len(self._few) - 1)]
        few, alone = [self._few[k] for k in order], [alone[k] for k in order]
        kept = (len(few) + 1) // 2
        exchanged = [few[k if k < kept else k % kept] for k in range(len(few))]
        for _ in range(DRAWS):
            one, other = (self._placed(self._collated(samples)) for samples in (few, exchanged))
            for number in range(SHAKEN + 1):
                with self._weights(number):
                    expected, found = (self._losses(batch, len(few)) for batch in (one, other))
                    differ = self._differ(expected[:kept], found[:kept]) or self._depends_on_padding(
                        one, expected, alone
                    )
                if differ:
                    self._step.refuse_as(messages.collated_with_others)
            self._state = self._after

    def _depends_on_padding(self, batch: Any, expected: Tensor, alone: list[Any]) -> bool:
        """Whether a record has another loss when it is cut down to the numbers that it has alone, the first or the last."""
        rows = rows_of(batch, len(alone), self._drawn.dims())
        pairs = [] if rows is None else [rows.chosen(torch.tensor([k, k])) for k in range(len(alone))]
        own, built = [shapes_in(pair) for pair in alone], [shapes_in(pair) for pair in pairs]
        if [list(map(len, shapes)) for shapes in own] != [list(map(len, shapes)) for shapes in built]:
            raise messages.not_collated(
                "it draws random numbers, and where the records lie in its batches is not clear"
            )
        if own == built:
            return False
        for last in (False, True):
            found = [self._losses(cut(pair, own[k], last), 2)[:1] for k, pair in enumerate(pairs)]
            if not self._differ(expected, torch.cat(found)):
                return False
        return True
