"""A steady step stays short enough to be read: few calls, in few files, with few changes from one to another."""

import json

import pytest

import children
import walk

# In a process of its own: what other tests have imported or switched off would be part of the walk.
COUNT = "import json, walk; print(json.dumps([walk.mlp().calls, walk.cnn().calls]))"


@pytest.fixture(scope="module")
def walks() -> list[walk.Walk]:
    done = children.run_code(COUNT)
    assert done.returncode == 0, done.stderr
    return [walk.Walk([(file, name) for file, name in calls]) for calls in json.loads(done.stdout)]


def test_a_steady_step_of_a_small_perceptron_is_a_short_walk(walks: list[walk.Walk]) -> None:
    taken = walks[0]
    assert len(taken.calls) <= 265
    assert len(taken.files) <= 24
    assert taken.changes <= 114


def test_a_policy_and_convolutions_make_it_longer_by_their_own_files(walks: list[walk.Walk]) -> None:
    plain, taken = walks
    added = taken.files - plain.files
    gradients = ("gradients/layers/", "gradients/forms/", "gradients/kernels", "native/")
    rooms = ("thresholds/", *gradients, "plan", "noise", "run_state", "saved_run")
    assert added
    assert all(file.startswith(rooms) for file in added), added
    assert len(taken.calls) <= 410
