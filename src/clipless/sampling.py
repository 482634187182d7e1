"""Poisson batches: every record is in each batch independently, with the plan's probability.

The loader announces each batch, and each part of it, to a listener before handing it out, so that the privacy engine
knows which records a gradient may come from and can refuse any other.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from clipless.errors import InvalidArgument, InvalidType, Misuse, whole
from clipless.noise import NoiseSource


@dataclass(frozen=True)
class Batch:
    """The announcement of a logical batch: which draw it is, how many records it has, how and at what rate drawn."""

    draw: int
    records: int
    sampling: str
    sample_rate: float


class Listener(Protocol):
    """Who must know of every batch before the training loop sees it."""

    def steps_left(self) -> int | None:
        """Steps until the budget is spent, None for no limit; raises when there are none."""

    def open_batch(self, batch: Batch) -> None: ...

    def open_part(self, records: int) -> None: ...


@dataclass(frozen=True)
class PoissonSampler:
    """Draws of record numbers. With a replayable source the same draw number gives the same records, whenever it is asked
    for; with any other each call draws anew, so ask once for each batch."""

    source: NoiseSource
    size: int
    rate: float
    name: str = "poisson"

    def indices(self, draw: int) -> Tensor:
        return (self.source.uniform("sample", draw, self.size) < self.rate).nonzero().flatten()


class PrivateLoader:
    """Collated Poisson batches. One pass is one epoch; `microbatches(n)` gives the same batches in parts."""

    def __init__(self, fetch: "Fetcher", sampler: PoissonSampler, steps_per_pass: int, listener: Listener) -> None:
        self.draws = 0
        self._passes = 0
        self._fetch = fetch
        self._sampler = sampler
        self._steps_per_pass = steps_per_pass
        self._listener = listener

    def __len__(self) -> int:
        return self._steps_per_pass

    def __iter__(self) -> Iterator[Any]:
        return (next(parts) for parts in self._pass(part_size=None))

    def microbatches(self, size: int) -> "MicroBatches":
        """For each logical batch an iterator of parts of at most `size` records: backward each, then step once."""
        return MicroBatches(self, whole("the size of a micro-batch", size))

    def _pass(self, part_size: int | None) -> Iterator[Iterator[Any]]:
        left = self._listener.steps_left()
        steps = self._steps_per_pass if left is None else min(self._steps_per_pass, left)
        return self._parts(steps, part_size)

    def _parts(self, steps: int, part_size: int | None) -> Iterator[Iterator[Any]]:
        self._passes += 1
        number = self._passes
        schedule = _Schedule(self._sampler, self.draws, steps, part_size)
        fetched = self._fetch(schedule.filled(), self.draws)
        for _ in range(steps):
            if number != self._passes:
                raise Misuse(
                    "a second pass over private.loader was begun before this one ended, and both would draw the same "
                    "batches: use one iterator at a time."
                )
            batch, sizes = schedule.next()
            self._listener.open_batch(batch)
            self.draws = batch.draw + 1
            parts = self._announced(sizes, fetched)
            yield parts
            deque(parts, maxlen=0)

    def _announced(self, sizes: list[int], fetched: Iterator[Any]) -> Iterator[Any]:
        for size in sizes:
            data = next(fetched) if size else self._fetch.empty()
            self._listener.open_part(size)
            yield data


class MicroBatches:
    """The passes of a loader, each logical batch cut into parts."""

    def __init__(self, loader: PrivateLoader, size: int) -> None:
        self._loader, self._size = loader, size

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Iterator[Any]]:
        return self._loader._pass(self._size)


class _Schedule:
    """The draws of one pass, each made once. Workers may fetch ahead of the training loop; both read the same draws, in
    order."""

    def __init__(self, sampler: PoissonSampler, first: int, steps: int, part_size: int | None) -> None:
        self._draws = iter(range(first, first + steps))
        self._sampler, self._part_size = sampler, part_size
        self._announcements: deque[tuple[Batch, list[int]]] = deque()
        self._unfetched: deque[Tensor] = deque()

    def next(self) -> tuple[Batch, list[int]]:
        """The next batch and the sizes of its parts; an empty batch has one empty part."""
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
        indices = self._sampler.indices(draw)
        parts = indices.split(self._part_size or max(1, len(indices)))
        batch = Batch(draw, len(indices), self._sampler.name, self._sampler.rate)
        self._announcements.append((batch, [len(part) for part in parts]))
        self._unfetched.extend(part for part in parts if len(part))


class Fetcher(Protocol):
    """Turns record numbers into collated data."""

    def __call__(self, parts: Iterator[Tensor], first_draw: int) -> Iterator[Any]: ...

    def empty(self) -> Any:
        """A batch without records, of the same structure."""


class MemoryFetcher:
    """Tensors in memory are indexed, all records at once."""

    def __init__(self, rows: Callable[[Tensor], Any]) -> None:
        self._rows = rows

    def __call__(self, parts: Iterator[Tensor], first_draw: int) -> Iterator[Any]:
        return map(self._rows, parts)

    def empty(self) -> Any:
        return self._rows(torch.empty(0, dtype=torch.int64))


class DataLoaderFetcher:
    """Any other data set goes through a DataLoader with the user's workers, collate function and pinned memory."""

    def __init__(self, dataset: Dataset[Any], settings: Mapping[str, Any]) -> None:
        self._dataset = dataset
        self._collate = settings.get("collate_fn") or default_collate
        self._feed = _Feed()
        self._generator = torch.Generator()
        own = {"generator": settings.get("generator") or self._generator}
        self._loader = DataLoader(dataset, batch_sampler=self._feed, **{**settings, **own})

    def __call__(self, parts: Iterator[Tensor], first_draw: int) -> Iterator[Any]:
        """A DataLoader draws the seed of its workers when a pass begins. From the global generator, that would change the
        dropout of a run that is resumed in the middle of a pass."""
        self._generator.manual_seed((torch.initial_seed() + first_draw) % 2**63)
        self._feed.parts = parts
        return iter(self._loader)

    def empty(self) -> Any:
        """One record's batch cut down to none; `collate([])` would lose shapes and types, so it is asked only if need be."""
        try:
            return emptied(self._collate([self._dataset[0]]))
        except InvalidArgument as refused:
            try:
                return self._collate([])
            except Exception:
                raise refused from None


class _Feed(BatchSampler):
    """A batch sampler that yields whatever parts it was given for this pass."""

    parts: Iterator[Tensor]

    def __init__(self) -> None:
        self.parts = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return (part.tolist() for part in self.parts)


TAKEN_OVER = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def source_of(data: object) -> tuple[Dataset[Any], int | None, dict[str, Any]]:
    """The data set, its own batch size if any, and the DataLoader settings to keep, of a Dataset or a DataLoader."""
    if isinstance(data, DataLoader):
        _refuse_own_sampling(data)
        settings = {name: getattr(data, name) for name in TAKEN_OVER}
        return _sized(data.dataset), data.batch_size, settings
    return _sized(data), None, {}


def fetcher(dataset: Dataset[Any], settings: Mapping[str, Any]) -> Fetcher:
    """The fastest fetcher that does what the settings say."""
    rows = _in_memory(dataset)
    plain = settings.get("collate_fn", default_collate) is default_collate and not settings.get("pin_memory")
    if rows is not None and plain:
        return MemoryFetcher(rows)
    return DataLoaderFetcher(dataset, settings)


def _in_memory(dataset: Dataset[Any]) -> Callable[[Tensor], list[Tensor]] | None:
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        return lambda indices: [tensor.index_select(0, indices.to(tensor.device)) for tensor in dataset.tensors]
    if type(dataset) is Subset:
        inner = _in_memory(dataset.dataset)
        if inner is not None:
            chosen = torch.as_tensor(dataset.indices)
            return lambda indices: inner(chosen[indices])
    return None


def _sized(dataset: object) -> Dataset[Any]:
    if isinstance(dataset, IterableDataset):
        raise InvalidType(
            "an IterableDataset cannot be sampled record by record: give a Dataset with __len__ and __getitem__."
        )
    if not (callable(getattr(dataset, "__getitem__", None)) and callable(getattr(dataset, "__len__", None))):
        raise InvalidType(f"dataset must be a Dataset or a DataLoader, got {type(dataset).__name__}.")
    if isinstance(dataset, (Tensor, dict, str)):
        raise InvalidType(f"dataset must be a Dataset: wrap your {type(dataset).__name__} in a TensorDataset.")
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise InvalidArgument("the data set is empty: there is nothing to train on.")
    return dataset  # type: ignore[return-value]


def _refuse_own_sampling(loader: DataLoader[Any]) -> None:
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", loader.sampler)
    plain = type(batches) is BatchSampler and type(sampler) in (RandomSampler, SequentialSampler)
    if isinstance(loader.dataset, IterableDataset):
        return
    partial = isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(sampler.data_source)
    )
    if not plain or partial:
        raise InvalidArgument(
            f"the DataLoader has its own sampling ({type(batches).__name__} over {type(sampler).__name__}), and its privacy "
            "is not that of Poisson batches. Give the data set, or a DataLoader with a plain batch_size."
        )


def emptied(batch: Any) -> Any:
    """A collated batch of one record cut down to none.

    >>> emptied({"x": torch.ones(1, 3), "name": ["ada"]})
    {'x': tensor([], size=(0, 3)), 'name': []}
    """
    if isinstance(batch, Tensor):
        return batch[:0] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: emptied(value) for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        nested = any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in batch)
        items = [emptied(item) for item in batch] if nested else []
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)  # type: ignore[call-arg]
    raise InvalidArgument(
        f"the collate function returns {type(batch).__name__}, of which clipless cannot make an empty batch: let it "
        "accept an empty list of records."
    )
