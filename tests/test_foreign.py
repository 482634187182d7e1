"""Scripts written for other libraries: their names and objects are understood, or refused in words that name the remedy."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, default_collate

import clipless
from clipless import InvalidType, Private
from clipless.foreign import FOREIGN_NAMES

FEATURES, CLASSES, SIZE, BATCH = 4, 3, 40, 10
X, Y = torch.zeros(SIZE, FEATURES), torch.zeros(SIZE, dtype=torch.int64)


def parts() -> tuple[nn.Module, Optimizer, TensorDataset]:
    model = nn.Linear(FEATURES, CLASSES)
    return model, SGD(model.parameters(), lr=0.1), TensorDataset(X, Y)


def attach(data: Any = None, **changes: Any) -> Private:
    model, optimizer, own = parts()
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "steps": 5, "seed": 3} | changes
    return clipless.make_private(
        model, optimizer, own if data is None else data, **{"loss_reduction": "mean", **settings}
    )


# Names of arguments.

MEANT = {
    "target_epsilon": "epsilon=",
    "target_delta": "delta=",
    "max_grad_norm": "clipping=",
    "data_loader": "dataset=",
    "module": "model=",
    "noise_generator": "seed=",
    "poisson_sampling": "always Poisson",
    "grad_sample_mode": "one engine",
    "clipping_fn": "clipping=",
    "criterion": "loss_reduction=",
}


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_an_argument_of_another_library_is_answered_by_the_one_that_is_meant(name: str) -> None:
    with pytest.raises(InvalidType, match=f"has no argument {name}=.*{MEANT.get(name, '')}"):
        attach(batch_size=BATCH, **{name: 1.0})


def test_a_call_as_opacus_has_it_is_answered() -> None:
    model, optimizer, data = parts()
    with pytest.raises(InvalidType, match="has no argument module=. What you mean is model="):
        clipless.make_private(  # type: ignore[call-arg]
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(data, batch_size=4),
            max_grad_norm=1.0,
            loss_reduction="mean",
        )


def test_an_argument_that_nobody_has_is_answered_by_the_nearest_one() -> None:
    with pytest.raises(InvalidType, match="did you mean 'batch_size'"):
        attach(batchsize=BATCH)
    assert issubclass(InvalidType, TypeError)


def test_what_make_private_returns_is_no_tuple() -> None:
    private = attach(batch_size=BATCH)
    with pytest.raises(InvalidType, match=r"no tuple: model and optimizer stay.*private\.loader"):
        _model, _optimizer, _loader = private  # type: ignore[misc]


# Data and loaders.


@pytest.mark.parametrize(
    "data",
    [(X, Y), [X, Y], (X.numpy(), Y.numpy()), [np.zeros((9, 2)), np.zeros(9)], (X,)],
    ids=["tuple", "list", "arrays", "list of arrays", "one"],
)
def test_columns_are_not_taken_for_records(data: Any) -> None:
    for given in (data, DataLoader(data, batch_size=1)):
        with pytest.raises(InvalidType, match=r"holds columns.*TensorDataset\(x, y\)"):
            attach(given, batch_size=1)


@pytest.mark.parametrize(
    "data",
    [
        [(x, y) for x, y in zip(X, Y, strict=True)],
        list(X),
        tuple(zip(X, Y, strict=True)),
        [torch.zeros(n) for n in (2, 3)],
    ],
    ids=["pairs", "tensors of one shape", "tuple of pairs", "tensors of other lengths"],
)
def test_a_list_of_records_is_a_data_set(data: Any) -> None:
    private = attach(data, batch_size=1)
    assert private.plan.dataset_size == len(data)


def test_the_loader_says_what_a_dataloader_says() -> None:
    _, _, data = parts()
    private = attach(data, batch_size=7)
    loader = private.loader
    assert (loader.dataset, loader.batch_size, loader.collate_fn, len(loader)) == (data, 7, default_collate, 5)

    def collate(rows: list[Any]) -> Any:
        return default_collate(rows)

    loader = attach(DataLoader(data, batch_size=BATCH, collate_fn=collate), epochs=2, steps=None).loader
    assert (loader.dataset, loader.batch_size, loader.collate_fn, len(loader)) == (data, BATCH, collate, 4)


def test_the_batch_size_of_a_plain_batch_sampler_is_taken_over() -> None:
    _, _, data = parts()
    private = attach(DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), BATCH, drop_last=False)))
    assert private.plan.expected_batch == BATCH


# Accelerate.


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_accelerate_prepares_is_trained_on(shuffle: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, optimizer, data = parts()
    prepared = accelerate.Accelerator(cpu=True).prepare(model, optimizer, DataLoader(data, BATCH, shuffle=shuffle))
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "epochs": 1}
    with pytest.raises(InvalidType, match=r"wraps another optimizer: .*optimizer\.optimizer"):
        clipless.make_private(*prepared, **{"loss_reduction": "mean", **settings})
    model, wrapper, loader = prepared
    private = clipless.make_private(model, optimizer, loader, **{"loss_reduction": "mean", **settings})
    for x, y in private.loader:
        wrapper.zero_grad()
        F.cross_entropy(model(x), y).backward()
        wrapper.step()
    assert private.ledger.steps == private.plan.steps == SIZE // BATCH
