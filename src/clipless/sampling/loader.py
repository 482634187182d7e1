"""Poisson batches: every record is in each batch independently, with the plan's probability.

The loader announces each batch, and each part of it, to a listener before yielding it, so that the privacy engine knows
which records a gradient may come from and can refuse any other.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Protocol, SupportsIndex

import torch
from torch import Tensor
from torch.utils.data import Dataset

from clipless.arguments import whole
from clipless.errors import Misuse
from clipless.noise import NoiseSource
from clipless.noise.keys import erase
from clipless.random_state import random_state_of, set_random_state
from clipless.sampling.fetching import Collate, Fetcher
from clipless.sampling.poisson import poisson_sample
from clipless.sampling.rows import BatchDims, Versions, versions_of
from clipless.sampling.sizes import spread

# The record numbers of a batch and its `most`, to those of its parts.
Split = Callable[[Tensor, int], list[Tensor]]


@dataclass(frozen=True)
class Batch:
    """A logical batch, as announced: number of the draw, number of records, how and at what rate it was drawn. `most` is the
    largest number of records on any rank if all ranks must take the same number of parts, else 0."""

    draw: int
    records: int
    sampling: str
    sample_rate: float
    most: int = 0


class BatchListener(Protocol):
    """Is notified of every batch before the training loop gets it."""

    def steps_left(self) -> int | None:
        """Steps until the budget is spent, None for no limit; raises if there are none."""

    def refuse_unstepped(self) -> None:
        """Raises if the batch that was opened last has not been stepped."""

    def open_batch(self, batch: Batch) -> None: ...

    def reopen_batch(self) -> None:
        """The open batch starts over; raises if none is open."""

    def open_part(self, records: int) -> None: ...


@dataclass(frozen=True)
class PoissonSampler:
    """Draws of record numbers. A draw can be repeated, with the same records, until it is forgotten.

    With `share=(rank, ranks)` every rank makes the same draw and takes every `ranks`-th record of it, starting with number
    `rank`: together they have each record of the draw exactly once. `in_step`: all ranks must take the same number of parts.
    """

    source: NoiseSource
    size: int
    rate: float
    name: str = "poisson"
    share: tuple[int, int] = (0, 1)
    in_step: bool = False

    def indices(self, draw: int) -> Tensor:
        """The numbers of the records of a batch."""
        return self.batch(draw)[1]

    def batch(self, draw: int) -> tuple[Batch, Tensor]:
        """A batch, as it is announced, and the numbers of its records."""
        key = self.source.sample_key(draw)
        chosen = poisson_sample(key, self.size, self.rate)
        erase(key)
        rank, ranks = self.share
        own = chosen[rank::ranks]
        return Batch(draw, len(own), self.name, self.rate, len(chosen[::ranks]) if self.in_step else 0), own

    def forget(self, before: int) -> None:
        """Erase the keys of earlier draws, which will not be repeated."""
        self.source.forget_draws(before)


class PrivateLoader:
    """Collated Poisson batches. One pass is one epoch; `microbatches(n)` gives the same batches in parts.

    Every batch that is drawn, even an empty one, must be stepped before the next: if batches were dropped by their contents,
    the sampling would not be that of the plan.
    """

    def __init__(
        self,
        fetch: Fetcher,
        sampler: PoissonSampler,
        steps_per_pass: int,
        listener: BatchListener,
        expected_batch: int,
    ) -> None:
        self.draws = 0
        self._passes = 0
        self._handed_out = 0
        self._newest: DrawnPart | None = None
        self._parts: list[Tensor] = []
        self._most = 0
        self._fetch = fetch
        self._sampler = sampler
        self._steps_per_pass = steps_per_pass
        self._listener = listener
        self._expected_batch = expected_batch

    @property
    def dataset(self) -> Dataset[Any]:
        """The data set that batches are drawn from."""
        return self._fetch.dataset

    @property
    def collate_fn(self) -> Collate:
        """Collates records into a batch."""
        return self._fetch.collate_fn

    @property
    def batch_size(self) -> int:
        """The expected number of records in a batch."""
        return self._expected_batch

    def __len__(self) -> int:
        return self._steps_per_pass

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Misuse("private.loader cannot be copied or pickled: a copy would draw the same batches. Iterate over it.")

    def __iter__(self) -> Iterator[Any]:
        return (next(parts) for parts in self._pass(_whole))

    @property
    def newest(self) -> "DrawnPart | None":
        """The part of the batch that was handed out last; None before the first."""
        return self._newest

    def microbatches(self, size: int) -> "MicroBatches":
        """For each logical batch, an iterator over parts of at most `size` records: backward each, then step once."""
        return MicroBatches(self, partial(_of_size, whole("the size of a micro-batch", size)))

    def parts(self, count: int) -> "MicroBatches":
        """For each logical batch, an iterator over exactly `count` parts of about equal size, some of which may be empty:
        for loops that step after a fixed number of backward passes."""
        return MicroBatches(self, partial(_so_many, whole("the number of parts", count)))

    def again(self) -> Any:
        """The last batch drawn, which has not been stepped, from its beginning: for use after an exception in the loop.

        The records are the same; sums accumulated for them are discarded.
        """
        return next(self._again(_whole))

    def _pass(self, split: Split) -> Iterator["Parts"]:
        left = self._listener.steps_left()
        steps = self._steps_per_pass if left is None else min(self._steps_per_pass, left)
        return self._batches(steps, split)

    def _batches(self, steps: int, split: Split) -> Iterator["Parts"]:
        self._listener.refuse_unstepped()
        self._passes += 1
        number = self._passes
        schedule = _Schedule(self._sampler, self.draws, steps, split)
        fetched = self._fetch(schedule.filled(), self.draws)
        for _ in range(steps):
            batch, parts = schedule.next()
            self._listener.open_batch(batch)
            self.draws = batch.draw + 1
            self._sampler.forget(self.draws)
            self._parts, self._most = parts, batch.most
            unfetched = deque(parts)
            yield self._announced(unfetched, lambda part: next(fetched))
            if number != self._passes:
                raise Misuse(
                    "this pass over private.loader is over, because a second one was begun or a record could not be "
                    "fetched: use one iterator at a time, and a new one after an exception."
                )
            self._listener.refuse_unstepped()
            for _ in filter(len, unfetched):
                next(fetched)  # parts of a batch that was finished by `again`

    def _again(self, split: Split) -> "Parts":
        self._listener.reopen_batch()
        return self._announced(deque(split(torch.cat(self._parts), self._most)), self._fetch.once)

    def _announced(self, parts: deque[Tensor], fetch: Callable[[Tensor], Any]) -> "Parts":
        """Each part's data, after its announcement. Only the newest iterator is valid: otherwise a part could be yielded
        twice."""
        self._handed_out += 1
        return Parts(self._while_newest(self._handed_out, parts, fetch))

    def _while_newest(self, number: int, parts: deque[Tensor], fetch: Callable[[Tensor], Any]) -> Iterator[Any]:
        while parts:
            if number != self._handed_out:
                raise Misuse(
                    "these micro-batches were handed out again or are of an earlier batch: use the newest ones."
                )
            part = parts.popleft()
            try:
                data = fetch(part) if len(part) else self._fetch.empty()
            except BaseException:
                self._passes += 1  # workers may be ahead or behind now, so the pass cannot continue
                raise
            self._listener.open_part(len(part))
            sizes = self._fetch.sizes if len(part) else None
            self._newest = DrawnPart(part, self._fetch, versions_of(data), sizes)
            yield data


@dataclass(frozen=True)
class DrawnPart:
    """The record numbers of a part of a batch, what fetches them, the tensors that were handed out, and the records' sizes
    unless they are indexed. `others` are record numbers of earlier parts."""

    indices: Tensor
    fetch: Fetcher
    given: Versions = ()
    sizes: Tensor | None = None
    others: tuple[int, ...] = ()

    @property
    def mixes(self) -> bool:
        """Whether user code puts the records together: a collate function, or a data set that fetches several at once."""
        return self.fetch.mixes

    def few(self, count: int) -> Tensor:
        """The numbers of some of its records and of the others: the shortest, the longest, and others in between. None at
        all if they are indexed."""
        if self.sizes is None:
            return self.indices[:0]
        return torch.tensor(sorted({*spread(self.indices, self.sizes, count), *self.others}))

    def samples(self, numbers: Tensor | None = None, together: bool = False) -> list[Any] | None:
        """Its records before they are collated, or those of other numbers, fetched again: each by itself, or all `together`.
        None if they are indexed and not collated."""
        return self.fetch.samples(self.indices if numbers is None else numbers, together)

    def chosen(self, rows: Tensor) -> "DrawnPart":
        """A part of this part."""
        return replace(self, indices=self.indices[rows], sizes=None if self.sizes is None else self.sizes[rows])

    def collate(self, samples: list[Any]) -> Any:
        """Some samples as a batch."""
        return self.fetch.collate_fn(samples)

    def dims(self) -> BatchDims:
        """Where the records lie in what was handed out; None if that cannot be told. Random numbers that the data set draws
        are drawn as if it had not been asked."""
        before = random_state_of((), ())
        try:
            return self.fetch.dims(self.indices[:1])
        except Exception:
            return None
        finally:
            set_random_state(before, ())


class Parts:
    """The micro-batches of one logical batch, in order. `private.step` takes all of them."""

    def __init__(self, parts: Iterator[Any]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._parts)


class MicroBatches:
    """The passes of a loader, with each logical batch split into parts."""

    def __init__(self, loader: PrivateLoader, split: Split) -> None:
        self._loader, self._split = loader, split

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Parts]:
        return self._loader._pass(self._split)

    def again(self) -> Parts:
        """The parts of the last batch drawn, which has not been stepped, from its beginning."""
        return self._loader._again(self._split)


class _Schedule:
    """The draws of one pass, each made once. Workers may fetch ahead of the training loop; both read the same draws, in
    order."""

    def __init__(self, sampler: PoissonSampler, first: int, steps: int, split: Split) -> None:
        self._draws = iter(range(first, first + steps))
        self._sampler, self._split = sampler, split
        self._announcements: deque[tuple[Batch, list[Tensor]]] = deque()
        self._unfetched: deque[Tensor] = deque()

    def next(self) -> tuple[Batch, list[Tensor]]:
        """The next batch and its record numbers, part by part; an empty batch has one empty part."""
        if not self._announcements:
            self._draw(next(self._draws))
        return self._announcements.popleft()

    def filled(self) -> Iterator[Tensor]:
        """Record numbers of all parts that are not empty, for the fetcher."""
        while True:
            while not self._unfetched:
                draw = next(self._draws, None)
                if draw is None:
                    return
                self._draw(draw)
            yield self._unfetched.popleft()

    def _draw(self, draw: int) -> None:
        batch, indices = self._sampler.batch(draw)
        parts = self._split(indices, batch.most)
        self._announcements.append((batch, parts))
        self._unfetched.extend(filter(len, parts))


def _whole(records: Tensor, most: int) -> list[Tensor]:
    return [records]


def _of_size(size: int, records: Tensor, most: int) -> list[Tensor]:
    """Parts of at most `size` records, followed by empty ones up to the number of parts that `most` records have."""
    parts = list(records.split(size))
    return parts + [records[:0]] * (-(-most // size) - len(parts))


def part_size(split: Split) -> int | None:
    """The size of the parts that a split gives, if it is a given one."""
    return split.args[0] if isinstance(split, partial) and split.func is _of_size else None


def _so_many(count: int, records: Tensor, most: int) -> list[Tensor]:
    return list(records.tensor_split(count))
