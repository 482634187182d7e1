"""The step game in two processes that train one run: every rule, policy and noise source keeps its claim there too."""

import json
from pathlib import Path
from typing import Any

import pytest
from game_ranks import GAMES
from test_step_game import least

from children import Child, all_done

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What both ranks found."""
    folder = tmp_path_factory.mktemp("games")
    told = [{"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"} for rank in range(2)]
    ranks = [Child(HERE / "game_ranks.py", folder, cwd=folder, notes=folder, environment=own) for own in told]
    ended = all_done(ranks)
    assert [done.returncode for done in ended] == [0, 0], "\n".join(done.stderr for done in ended)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("name", "noise"), GAMES)
def test_no_rule_policy_or_noise_source_breaks_its_claim(
    found: list[dict[str, dict[str, Any]]], name: str, noise: str
) -> None:
    one, other = (rank[f"{name}, {noise}"] for rank in found)
    assert one == other
    assert one["sound"], one
    assert one["lower_bound"] <= one["claimed_epsilon"]
    assert one["joint"] or one["pair_bound"] >= least(name) * one["claimed_epsilon"]


def test_a_sum_that_is_added_twice_is_found(found: list[dict[str, dict[str, Any]]]) -> None:
    for rank in found:
        assert not rank["added twice"]["sound"]
        assert rank["added twice"]["lower_bound"] > rank["added twice"]["claimed_epsilon"]
