"""From record numbers to collated data: by indexing tensors in memory, or through a DataLoader with the user's options."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

from clipless.errors import InvalidArgument, InvalidType
from clipless.sampling.repeats import refuse_repeats
from clipless.sampling.rows import BatchDims, learned_dims
from clipless.sampling.sizes import Measured, MeasuringCollate

Collate = Callable[[list[Any]], Any]


class Fetcher(Protocol):
    """Turns the numbers of records, which are below `size`, into collated data. `sizes` are those of the records fetched
    last, before they were collated; None if they are not collated but indexed."""

    dataset: Dataset[Any]
    size: int
    collate_fn: Collate
    sizes: Tensor | None

    def __call__(self, parts: Iterator[Tensor], first_draw: int) -> Iterator[Any]: ...

    def once(self, part: Tensor) -> Any:
        """One part, fetched in this process without disturbing a pass."""

    def empty(self) -> Any:
        """A batch without records, of the same structure."""

    @property
    def mixes(self) -> bool:
        """Whether user code gets several records together, so that one could end up in another's place of the batch."""

    def samples(self, part: Tensor, together: bool = False) -> list[Any] | None:
        """The records of a part before they are collated, each fetched by itself, or all `together` where the data set
        fetches several at once; None if they are not collated but indexed."""

    def dims(self, part: Tensor) -> BatchDims:
        """Where the records lie in a batch; None if that cannot be told. The records of a part help to find out."""


class MemoryFetcher:
    """Indexes tensors in memory, all records at once."""

    sizes: Tensor | None = None

    def __init__(self, dataset: Dataset[Any], rows: Callable[[Tensor], Any]) -> None:
        self.dataset, self.collate_fn = dataset, default_collate
        self.size, self._rows = len(dataset), rows  # type: ignore[arg-type]

    def __call__(self, parts: Iterator[Tensor], first_draw: int) -> Iterator[Any]:
        return map(self._rows, parts)

    def once(self, part: Tensor) -> Any:
        return self._rows(part)

    def empty(self) -> Any:
        return self._rows(torch.empty(0, dtype=torch.int64))

    @property
    def mixes(self) -> bool:
        return False

    def samples(self, part: Tensor, together: bool = False) -> list[Any] | None:
        return None

    def dims(self, part: Tensor) -> BatchDims:
        return [0] * len(self.empty())


class DataLoaderFetcher:
    """Fetches from any other data set through a DataLoader with the user's workers, collate function and pinned memory."""

    sizes: Tensor | None = None

    def __init__(self, dataset: Dataset[Any], options: Mapping[str, Any]) -> None:
        self.dataset, self.size = dataset, len(dataset)  # type: ignore[arg-type]
        self.collate_fn: Collate = options.get("collate_fn") or default_collate
        self._feed = _Feed()
        self._dims: BatchDims = None
        self._generator = torch.Generator()
        self._measuring = MeasuringCollate(self.collate_fn)
        own = {"generator": options.get("generator") or self._generator, "collate_fn": self._measuring}
        self._loader = DataLoader(dataset, batch_sampler=self._feed, **{**options, **own})

    def __call__(self, parts: Iterator[Tensor], first_draw: int) -> Iterator[Any]:
        """The workers' seed is not drawn from the global generator, as a DataLoader would when a pass begins: that would
        change the dropout of a run that is resumed in the middle of a pass."""
        self._generator.manual_seed((torch.initial_seed() + first_draw) % 2**63)
        self._feed.parts = parts
        return map(self._noted, iter(self._loader))

    def once(self, part: Tensor) -> Any:
        batches = [part.tolist()]
        options = {"collate_fn": self._measuring, "pin_memory": self._loader.pin_memory, "generator": self._generator}
        return self._noted(next(iter(DataLoader(self.dataset, batch_sampler=batches, **options))))  # type: ignore[arg-type]

    def _noted(self, fetched: Measured) -> Any:
        self.sizes = torch.tensor(fetched.sizes)
        return fetched.batch

    @property
    def mixes(self) -> bool:
        return self.collate_fn is not default_collate or hasattr(self.dataset, "__getitems__")

    def samples(self, part: Tensor, together: bool = False) -> list[Any]:
        fetch, numbers = getattr(self.dataset, "__getitems__", None), part.tolist()
        if fetch is None:
            return [self.dataset[number] for number in numbers]
        return list(fetch(numbers)) if together else [fetch([number])[0] for number in numbers]

    def dims(self, part: Tensor) -> BatchDims:
        if self._dims is None:
            samples = self.samples(part[:1])
            self._dims = learned_dims(self.collate_fn(samples), self.collate_fn(samples * 2))
        return self._dims

    def empty(self) -> Any:
        """A batch of one record, emptied. `collate([])` would lose shapes and types, so it is only the fallback."""
        try:
            return emptied(self.collate_fn([self.dataset[0]]))
        except InvalidArgument as refused:
            try:
                return self.collate_fn([])
            except Exception:
                raise refused from None


class _Feed(BatchSampler):
    """A batch sampler that yields the parts of the current pass."""

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
    """The data set, the batch size if a DataLoader has one, and the DataLoader's options, from a Dataset or a DataLoader."""
    if isinstance(data, DataLoader):
        _refuse_own_sampling(data)
        options = {name: getattr(data, name) for name in TAKEN_OVER}
        size = data.batch_size if data.batch_size is not None else getattr(data.batch_sampler, "batch_size", None)
        return _sized(data.dataset), size, options
    return _sized(data), None, {}


def fetcher(dataset: Dataset[Any], options: Mapping[str, Any]) -> Fetcher:
    """The fastest fetcher that supports the options."""
    rows = _in_memory(dataset)
    plain = options.get("collate_fn", default_collate) is default_collate and not options.get("pin_memory")
    if rows is not None and plain:
        return MemoryFetcher(dataset, rows)
    return DataLoaderFetcher(dataset, options)


def _in_memory(dataset: Dataset[Any]) -> Callable[[Tensor], list[Tensor]] | None:
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        here = all(tensor.is_cpu for tensor in dataset.tensors)
        return lambda indices: [
            tensor.index_select(0, indices if here else indices.to(tensor.device)) for tensor in dataset.tensors
        ]
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
    if _columns(dataset):
        raise InvalidType(
            f"a {type(dataset).__name__} of arrays holds columns, and a data set holds records: give "
            "torch.utils.data.TensorDataset(x, y)."
        )
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise InvalidArgument("the data set is empty: there is nothing to train on.")
    refuse_repeats(dataset)
    return dataset  # type: ignore[return-value]


def _columns(data: object) -> bool:
    """Whether this is `(x, y)`: a tuple of arrays, or a list of arrays of one length and different shapes.

    A list of arrays of one shape, or of different lengths, may be a list of records.
    """
    if not isinstance(data, tuple | list) or not data:
        return False
    shapes = [tuple(getattr(item, "shape", ())) for item in data]
    if isinstance(data, tuple):
        return all(shapes)
    return all(shapes) and len({shape[0] for shape in shapes}) == 1 and len(set(shapes)) > 1


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
    """A collated batch of one record, emptied.

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
