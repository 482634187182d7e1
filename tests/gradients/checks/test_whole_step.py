"""`private.step` checks the whole function from batch to losses: what couples records or keeps something of them is refused
before anything is released, with the line or the parameter; what keeps its records apart trains."""

import pytest
import torch

from broken_steps import BROKEN
from clipless import Misuse
from sound_steps import SOUND
from step_zoo import begin, by_loop, by_step


@pytest.mark.parametrize("name", BROKEN)
def test_broken_functions_are_refused_before_anything_is_released(name: str) -> None:
    entry = BROKEN[name]
    _, _, private = begin(entry)
    batch = next(iter(private.loader))
    with pytest.raises(Misuse, match=entry.names):
        private.step(entry.make(), batch)
    assert private.ledger.steps == 0
    private.detach()


@pytest.mark.parametrize("batch_size", [1, 8, 16])
@pytest.mark.parametrize("name", SOUND)
def test_sound_functions_train_as_in_a_loop(name: str, batch_size: int) -> None:
    """To the bit, with the same seed. Parts of a model are refused in the loop, where clipless does not see between them."""
    entry = SOUND[name]
    weights = by_step(entry, batch_size=batch_size)
    if name not in ("in parts", "forward()"):
        assert torch.equal(weights, by_loop(entry, batch_size=batch_size))
