"""Every number of a clipping can be searched, and is priced as what it releases."""

from pathlib import Path

import numpy as np
import pytest

from clipless.app.data.dataset import make_data
from clipless.app.training import TrainingSettings
from clipless.app.tuning import Grid, parse_tries, plan_search, tune
from clipless.app.tuning.candidates import read_grid
from clipless.errors import CliplessError

SHARED = TrainingSettings(model="linear", epochs=1, batch_size=60, clipping="dc-p")


def tried(*tries: str) -> list[str]:
    return [one.clipping for one in parse_tries(tries).candidates(SHARED)]


def test_numbers_of_the_clipping_are_tried_one_by_one_and_together() -> None:
    assert tried("clipping.percentile=0.1,0.3") == ["dc-p(percentile=0.1)", "dc-p(percentile=0.3)"]
    both = tried("clipping.percentile=0.1,0.3", "clipping.bins=10,20")
    assert both[:2] == ["dc-p(percentile=0.1, bins=10)", "dc-p(percentile=0.1, bins=20)"]
    assert len(both) == 4


def test_a_list_of_clippings_is_split_outside_of_brackets() -> None:
    assert tried("clipping=dc-p(percentile=0.3, bins=30),auto-s") == ["dc-p(percentile=0.3, bins=30)", "auto-s"]


def test_a_grid_file_may_write_it_with_a_point(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(
        '[grid]\nclipping.percentile = [0.1, 0.3]\n[settings]\nclipping = "dc-p(bins=9)"\n'
    )
    found = [one.clipping for one in read_grid(tmp_path / "grid.toml").candidates(TrainingSettings())]
    assert found == ["dc-p(bins=9, percentile=0.1)", "dc-p(bins=9, percentile=0.3)"]


def test_switches_are_tried_by_their_words() -> None:
    found = parse_tries(["unit_gradients=true,false"]).candidates(SHARED)
    assert [one.unit_gradients for one in found] == [True, False]


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        ("clipping.percentil=0.3", "percentile"),
        ("clipping.percentile=3", "between 0 and 1"),
        ("clipping.percentile=0.3,0.3", "candidate twice"),
        ("unit_gradients=maybe", "true or false"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_is_spent(attempt: str, words: str) -> None:
    with pytest.raises(CliplessError, match=words):
        tried(attempt)


def test_a_search_over_a_decaying_noise_is_priced_by_its_schedule(tmp_path: Path) -> None:
    """The rate at which the noise falls changes what a run releases; the runs match what was recorded for them."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 300)
    x = rng.normal(size=(300, 3)) + y[:, None]
    data = make_data("clouds", (x[:240], y[:240]), (x[240:], y[240:]))
    shared = TrainingSettings(model="linear", epochs=1, batch_size=60, clipping="decay")
    candidates = Grid({"clipping.noise_rho": [1.0, 0.25]}).candidates(shared)
    search = plan_search(data, candidates, epsilon=4.0, delta=4e-4, method="grid")
    assert [len(run) for run in search.runs] == [1, 4]
    tuned = tune(search, out=tmp_path, seed=1)  # refuses a run that released more than was recorded
    assert tuned.result.epsilon is not None
    assert tuned.result.epsilon <= 4.0
    assert [one["clipping"] for one in tuned.record()["candidates"]] == [one.clipping for one in candidates]
