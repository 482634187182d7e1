"""The history of what was released: whole while it is short, evenly spaced when it is long, and never larger than that."""

import pytest
import torch

from clipless.thresholds import history as module
from clipless.thresholds.history import LENGTH, History


def noted(steps: int, history: History | None = None, first: int = 0) -> History:
    history = history or History()
    for step in range(first, steps):
        history.append({"thresholds": torch.tensor([[float(step)], [-float(step)]])}, torch.full((2, 3), step + 0.5))
    return history


@pytest.mark.parametrize("length", [4, LENGTH])
@pytest.mark.parametrize("share", [0, 0.2, 0.99, 1, 1.01, 1.99, 2, 2.3, 4.1])
def test_kept_are_the_values_after_evenly_spaced_steps(
    length: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LENGTH", length)
    steps = round(share * length)
    history = noted(steps)
    numbers = history.steps.tolist()
    stride = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    assert numbers == list(range(0, steps, stride))
    assert stride == next(2**k for k in range(9) if steps <= length * 2**k)
    assert len(history) == len(numbers) <= length
    if steps:
        assert history["thresholds"][:, 0, 0].tolist() == numbers
        assert history["statistic"].tolist() == [[[number + 0.5] * 3] * 2 for number in numbers]


@pytest.mark.parametrize("saved", [0, 1, 2, 3, 7, 8, 9, 100])
def test_a_saved_history_goes_on_as_if_it_had_not_been(saved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LENGTH", 8)
    loaded = History.from_state_dict(noted(saved).state_dict())
    assert loaded.to_dict() == noted(saved).to_dict()
    assert noted(saved + 50, loaded, saved).to_dict() == noted(saved + 50).to_dict()


def test_what_is_handed_out_is_a_copy() -> None:
    history = noted(5)
    history["thresholds"].zero_()
    value = torch.ones(2, 1)
    history.append({"thresholds": value}, None)
    value.zero_()
    assert history["thresholds"][-1].tolist() == [[1.0], [1.0]]
    assert history["thresholds"][3, 0].item() == 3


def test_memory_stays_what_it_is() -> None:
    history = noted(LENGTH)
    rooms = {name: rows.nbytes for name, rows in history._rows.items()}
    noted(5 * LENGTH, history, LENGTH)
    assert {name: rows.nbytes for name, rows in history._rows.items()} == rooms
