"""The digests by which ranks compare their records."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from clipless.distributed.records import MISSING, digest_of, sampled_numbers

RECORD = {"x": torch.arange(3.0), "image": np.arange(4), "words": ["a", "b"], "length": 2, "pair": (1.0, None)}
CHANGES: dict[str, Any] = {
    "x": torch.tensor([0.0, 1.0, 3.0]),
    "image": np.arange(4) + 1,
    "words": ["a", "c"],
    "length": 3,
    "pair": (1.0, 2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_kind_of_content_is_part_of_the_digest(name: str) -> None:
    assert digest_of(lambda _: dict(RECORD), 0) == digest_of(lambda _: dict(RECORD), 0)
    assert digest_of(lambda _: RECORD | {name: CHANGES[name]}, 0) != digest_of(lambda _: RECORD, 0)


def test_random_records_are_drawn_from_one_state_which_is_restored() -> None:
    def fetch(numbers: torch.Tensor) -> Any:
        return torch.rand(2), np.random.rand(), random.random()

    torch.manual_seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index, union-attr]
    first = digest_of(fetch, 5)
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])  # type: ignore[index, arg-type]
    assert states[2] == random.getstate()
    fetch(torch.tensor([5]))
    assert digest_of(fetch, 5) == first


def test_a_record_that_cannot_be_fetched_is_missing() -> None:
    def fetch(numbers: torch.Tensor) -> Any:
        raise OSError("not readable")

    assert digest_of(fetch, 0) == MISSING
    assert digest_of(lambda numbers: numbers, 0) != MISSING


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 1000, 10**9])
def test_the_sample_spans_the_data_set(size: int) -> None:
    found = sampled_numbers(size)
    assert len(found) == len(set(found)) == min(size, 32)
    assert found[0] == 0
    assert found[-1] == size - 1
