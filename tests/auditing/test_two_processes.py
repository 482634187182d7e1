"""The step game in two processes that train one run: every rule, policy and noise source keeps its claim there too."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from game_ranks import GAMES

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What both ranks found."""
    folder = tmp_path_factory.mktemp("games")
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    command = [sys.executable, str(HERE / "game_ranks.py"), str(folder)]
    told = [{"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": path} for rank in range(2)]
    ranks = [
        subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for own in told
    ]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("name", "noise"), GAMES)
def test_no_rule_policy_or_noise_source_breaks_its_claim(
    found: list[dict[str, dict[str, Any]]], name: str, noise: str
) -> None:
    one, other = (rank[f"{name}, {noise}"] for rank in found)
    assert one == other
    assert one["sound"], one
    assert one["lower_bound"] <= one["claimed_epsilon"]
    if noise == "seeded":  # other sources draw anew in every run, and few games may prove little
        assert one["lower_bound"] > 0.3 * one["claimed_epsilon"]


def test_a_sum_that_is_added_twice_is_found(found: list[dict[str, dict[str, Any]]]) -> None:
    for rank in found:
        assert not rank["added twice"]["sound"]
        assert rank["added twice"]["lower_bound"] > rank["added twice"]["claimed_epsilon"]
