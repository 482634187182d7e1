"""A data set that holds a record twice is refused, however it was put together; one that holds each once is not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

import clipless
from clipless import InvalidArgument
from clipless.sampling.fetching import source_of
from clipless.sampling.repeats import Origins


class Squares(Dataset[int]):
    """Records that are computed."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> int:
        return number**2


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(50.0).view(50, 1))


X = torch.arange(60.0).view(30, 2)
DATA = {"tensors": tensors(), "computed": Squares(), "list": list(torch.randn(50, 2))}

REPEATED: dict[str, Callable[[Any], Any]] = {
    "an index twice": lambda data: Subset(data, [3, 4, 3]),
    "an index from the end": lambda data: Subset(data, [49, 0, -1]),
    "the indices of an array": lambda data: Subset(data, np.array([1, 1])),  # type: ignore[arg-type]
    "the indices of a tensor": lambda data: Subset(data, torch.tensor([2, 5, 2])),  # type: ignore[arg-type]
    "all twice": lambda data: ConcatDataset([data, data]),
    "a part twice": lambda data: ConcatDataset([data, Subset(data, [7])]),
    "parts that overlap": lambda data: ConcatDataset([Subset(data, range(30)), Subset(data, range(29, 50))]),
    "a subset of a subset": lambda data: Subset(Subset(data, [5, 6, 7]), [0, 1, -3]),
    "a subset of both": lambda data: Subset(ConcatDataset([data, data]), [0, 50]),
    "nested": lambda data: ConcatDataset([ConcatDataset([Subset(data, [1]), Squares()]), Subset(data, [0, 1])]),
    "through a DataLoader": lambda data: DataLoader(Subset(data, [0, 0]), batch_size=1),
}
SINGLE: dict[str, Callable[[Any], Any]] = {
    "itself": lambda data: data,
    "a permutation": lambda data: Subset(data, torch.randperm(50).tolist()),
    "a split put together again": lambda data: ConcatDataset(random_split(data, [0.3, 0.7])),
    "another data set of equal records": lambda data: ConcatDataset([data, Squares(), Squares(), tensors()]),
    "other halves": lambda data: ConcatDataset([Subset(data, range(25)), Subset(data, range(-25, 0))]),
    "one of both": lambda data: Subset(ConcatDataset([data, data]), [0, 51]),
}


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("how", REPEATED)
def test_a_record_that_occurs_twice_is_refused(how: str, kind: str) -> None:
    with pytest.raises(InvalidArgument, match=r"a record more than once.*sorted\(set\(indices\)\)"):
        source_of(REPEATED[how](DATA[kind]))


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("how", SINGLE)
def test_records_that_occur_once_are_not(how: str, kind: str) -> None:
    source_of(SINGLE[how](DATA[kind]))


def test_make_private_refuses_them_and_changes_nothing() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = tensors()
    settings = {"noise_multiplier": 1.0, "batch_size": 5, "steps": 1}
    with pytest.raises(InvalidArgument, match="more than once"):
        clipless.make_private(model, optimizer, Subset(data, [1, 2, 3, 4, 5, 1]), **settings)
    private = clipless.make_private(model, optimizer, Subset(data, [1, 2, 3, 4, 5]), **settings)
    private.detach()


def test_data_sets_of_the_same_tensors_hold_the_same_records() -> None:
    y = torch.zeros(30)
    with pytest.raises(InvalidArgument, match="more than once"):
        source_of(ConcatDataset([TensorDataset(X, y), TensorDataset(X, y)]))
    source_of(ConcatDataset([TensorDataset(X[:15]), TensorDataset(X[15:])]))


@pytest.mark.parametrize("record", [torch.ones(2), {"x": 1}, [1.0], (torch.ones(2), 3), np.ones(2)], ids=repr)
def test_a_list_with_the_same_object_twice_is_refused(record: Any) -> None:
    with pytest.raises(InvalidArgument, match="more than once"):
        source_of([record, torch.zeros(1), record])


@pytest.mark.parametrize("value", [1, 0.5, "yes", None, (1, "a"), ()], ids=repr)
def test_equal_values_are_different_records(value: Any) -> None:
    source_of([value] * 3)


def test_the_records_of_a_combination_have_the_numbers_of_their_origin() -> None:
    data, other = tensors(), Squares()
    numbering = Origins()
    whole, rest = (numbering.of(each)(np.arange(50)) for each in (data, other))
    mixed = Subset(ConcatDataset([other, Subset(data, [9, 8, 7])]), [52, 0, 50])
    assert numbering.of(mixed)(np.arange(3)).tolist() == [whole[7], rest[0], whole[9]]
    assert not set(whole.tolist()) & set(rest.tolist())
