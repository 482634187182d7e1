"""The training data that the Trainer sees: the Poisson batches of the private run, an epoch at a time."""

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset

from clipless.errors import InvalidType, Misuse
from clipless.integrations.lightning.length import RunLength
from clipless.private import Private
from clipless.runs.checkpoint import set_random_states


class PoissonBatches:
    """An iterable in place of the user's DataLoader, which `find` returns and which is asked for when it is first needed:
    data modules are set up by then.

    Its length is that of an epoch: of batches, or of parts where each batch is split. It has batches as soon as it has the
    run. `newest` is the last one, as it was collated.
    """

    newest: Any = None

    def __init__(
        self,
        find: Callable[[], DataLoader[Any]],
        parts: int,
        length: Callable[[DataLoader[Any]], RunLength],
    ) -> None:
        self.private: Private | None = None
        self.random: dict[str, Any] | None = None  # of a resumed run, to be set before its first batch is fetched
        self._find, self._parts, self._length = find, parts, length

    @cached_property
    def source(self) -> DataLoader[Any]:
        """The user's DataLoader."""
        return self._find()

    @cached_property
    def length(self) -> RunLength:
        """How long the run and its epochs are."""
        return self._length(self.source)

    @property
    def dataset(self) -> Dataset[Any]:
        """The records that batches are drawn from."""
        return self.source.dataset

    def __len__(self) -> int:
        return self.length.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        if self.private is None:
            raise Misuse("batches before the private run was made: iterate over train_dataloader() of your own.")
        if self.random is not None:
            set_random_states(self.random)
            self.random = None
        for parts in islice(self.private.loader.parts(self._parts), self.length.steps_per_epoch):
            for self.newest in parts:
                yield self.newest


def one_loader(given: object) -> DataLoader[Any]:
    """The DataLoader itself; raises for anything else."""
    if not isinstance(given, DataLoader):
        raise InvalidType(
            f"private training takes one DataLoader, got {type(given).__name__}: its records are drawn by Poisson sampling, "
            "in batches of its batch_size. Combine several data sets with torch.utils.data.ConcatDataset."
        )
    return given
