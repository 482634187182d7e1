"""Sharded models, FSDP2: real processes, real groups, against the same run in one process."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scenarios
import sharded_scenarios
import torch
from sharded_scenarios import SHARDED, WORLDS, begin_dropout, model_of, state, trained
from shared_run import BATCH, SIZE, released
from test_data_parallel import distance, equal
from torch import Tensor
from worlds import world

import clipless


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[Any, Any]]:
    """What three processes gave, which are started once; one of them is killed in the end."""
    return world("everything_sharded", 3, folder)


@pytest.fixture(scope="module")
def pair(ranks: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """What the ranks of the world of two gave."""
    return [ranks[member] for member in WORLDS[2]]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in tensors])


def worlds_of(case: str, ranks: list[dict[Any, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    for size, members in WORLDS.items():
        for member in members:
            if case in ranks[member][size]:
                yield size, ranks[member][size][case]


@pytest.mark.parametrize(("name", "groups"), sorted({case for cases in SHARDED.values() for case in cases}))
def test_the_run_is_that_of_one_process(ranks: Any, name: str, groups: str) -> None:
    """Whole batches and parts."""
    alone, seen = scenarios.case(name, groups), 0
    for _, found in worlds_of(f"{name} {groups}", ranks):
        seen += 1
        for step in range(3):
            assert distance(found["gradients"][step], alone["gradients"][step]) < 1e-6
        assert torch.allclose(found["thresholds"], alone["thresholds"], rtol=1e-5)
        for key in ("ledger", "spent", "plan"):
            assert found[key] == alone[key]
    assert seen > 0


def test_ranks_without_records_take_part(ranks: Any) -> None:
    alone = sharded_scenarios.few()
    assert {size for size, _ in worlds_of("few", ranks)} == set(WORLDS)
    for _, found in worlds_of("few", ranks):
        for step in range(6):
            assert distance(found["gradients"][step], alone["gradients"][step]) < 1e-6


@pytest.mark.parametrize("kind", ["plain", "fails", "draws"])
def test_ranks_check_themselves_on_any_number_of_records(ranks: Any, kind: str) -> None:
    """None, one or more; with passes that fail on one rank, and with random numbers, where the ranks agree with each
    other instead of with one process. A schedule changes the clipping on the way."""
    alone, met = sharded_scenarios.uneven(kind), set()
    for size in WORLDS:
        found = [rank for world_size, rank in worlds_of(f"uneven {kind}", ranks) if world_size == size]
        assert len(found) == size
        for rank in found:
            met |= {
                min(records, 2) for records, passes in zip(rank["records"], rank["compared"], strict=True) if passes
            }
            assert equal(rank["gradients"], found[0]["gradients"])
            for step in range(12) if kind != "draws" else ():
                # sums over ranks are made in float64, and those of one process in float32
                assert distance(rank["gradients"][step], alone["gradients"][step]) < 2e-6
        checked = [any(passes) for passes in zip(*(rank["compared"] for rank in found), strict=True)]
        without = [0 in records for records in zip(*(rank["records"] for rank in found), strict=True)]
        met |= {0 for one, other in zip(checked, without, strict=True) if one and other}
    assert met == {0, 1, 2}


def test_a_check_that_fails_on_one_rank_stops_all(pair: Any) -> None:
    first, second = (rank["mixes"] for rank in pair)
    assert first.startswith("UnsupportedModule: the output of '(model)' for one record depends on the other records")
    assert second.startswith("RankFailed: another rank could not go on at step ")


def test_noise_is_that_of_one_process_bit_for_bit(ranks: Any) -> None:
    """On gradients of zero the release is the noise. Of 12,288 numbers the variance is within 6.5 of its standard errors,
    8.3 %, in all but one of 10**10 seeds."""
    alone = scenarios.pure_noise()
    for _, found in worlds_of("noise", ranks):
        assert equal(found["gradients"], alone["gradients"])
        noise = torch.cat([step[0].flatten() for step in found["gradients"]]).double()
        assert abs(float(noise.var()) / (1.5 / BATCH) ** 2 - 1) < 6.5 * math.sqrt(2 / len(noise))


@pytest.mark.parametrize("name", ["encoder", "lora", "checkpointed", "attention"])
def test_models_trained_in_parts(pair: Any, name: str) -> None:
    """Relative to what one record adds, where the records of a batch cancel."""
    alone = trained(model_of(name))
    for rank in pair:
        for kind in ("models", "data parallel"):
            for step, found in enumerate(rank[kind].get(name, [])):
                expected = flat(alone[step])
                assert float((flat(found) - expected).norm()) < 1e-6 * max(float(expected.norm()), 1 / BATCH)
        assert len(rank["models"][name]) == 4


def test_a_mean_of_losses_is_taken_apart(pair: Any) -> None:
    alone = trained(model_of("encoder"))
    for rank in pair:
        for step in range(4):
            assert distance(rank["scalar"][step], alone[step]) < 1e-5


def test_half_precision_gives_three_digits(pair: Any) -> None:
    alone = trained(model_of("encoder"))
    for rank in pair:
        assert 1e-6 < distance(rank["half"][0], alone[0]) < 3e-2


def test_removing_a_record_moves_the_mean_by_its_threshold(pair: Any) -> None:
    """The first record is on the first rank, the last on the other: the sum moves by no more than the threshold, 1."""
    for rank in pair:
        everything, *less = rank["without a record"]
        for rest in less:
            assert 0.9 < float((flat(everything) - flat(rest)).norm()) * SIZE < 1 + 1e-3


def test_a_rank_holds_its_share_and_no_more(pair: Any) -> None:
    """Half of everything, and at most one row more of each parameter."""
    for rank in pair:
        held = rank["held"]
        for what in ("parameters", "gradients", "moments", "sums"):
            assert held[what] < 0.55 * held["all"], what


def test_a_detached_model_is_reduced_by_fsdp_again(pair: Any) -> None:
    one, other = (rank["plain again"] for rank in pair)
    assert equal(one, other)
    assert all(grad.any() for grad in one[1:])


REFUSED = {
    "parts": r"Misuse: parts of the model are sharded or tensor-parallel.*is not sharded: call fully_shard on",
    "ignored": r"Misuse: parameter '0\.weight' is not sharded, and others are",
    "offloaded": r"Misuse: fully_shard with an offload_policy is not supported",
    "alone": r"Misuse: the model is sharded over processes, and group=False says",
    "early optimizer": r"InvalidArgument: the optimizer does not hold the trainable parameter .*after fully_shard",
    "check": r"Misuse: check= runs the model in one process: call clipless\.check\(\.\.\.\) before fully_shard",
    "checked": r"Misuse: parameter '0\.weight' is sharded over processes \(DTensor\)",
    "projections": r"InvalidArgument: gradients='jl' needs the whole model in one process, and this one is sharded",
    "sampler": r"InvalidArgument: sgld keeps samples of all weights, and this model is sharded",
    "broadcast": r"Misuse: the model is sharded: every rank has a part of the weights",
    "inside": r"Misuse: module '0' of a sharded model was called by itself",
    "never called": r"UnsupportedModule: module 'attention\.self_attn' runs while its parameters are sharded",
    "stray": r"UnsupportedModule: parameter 'first\.weight' is used outside the module that owns it",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(pair: Any, what: str) -> None:
    for rank in pair:
        assert re.search(REFUSED[what], rank["refused"][what]), rank["refused"][what]


def test_a_pass_that_failed_is_repeated(pair: Any) -> None:
    alone = released(steps=3)
    first, second = (rank["again"] for rank in pair)
    assert first["not ready"].startswith("Misuse: step() without a batch")
    assert second["not ready"].startswith("RankFailed: another rank could not go on at step 1")
    for rank in (first, second):
        assert rank["failed"]
        assert rank["steps"] == 1
        assert distance(rank["gradients"], alone["gradients"][0]) < 1e-6


def test_parts_that_were_left_out_are_named(pair: Any) -> None:
    """At once, and not when the others have waited long enough."""
    for rank in pair:
        for refusal in rank["missed"].values():
            assert refusal.startswith("Misuse: a part of the batch did not go through the model and backward()")


def test_a_rank_that_is_killed_stops_the_others(ranks: Any, tmp_path: Path) -> None:
    """Inside our reduction, and inside FSDP2's own gathering."""
    gathering, gone = world("lost_while_gathering", 2, tmp_path)
    assert "killed" not in ranks[2]
    assert not gone
    for left, where in ((ranks[0]["killed"], "the sum over the ranks"), (gathering, "a block of the model")):
        assert left["refused"].startswith(f"RankFailed: the other ranks could not be reached at {where}"), left
        assert "the other ranks were lost" in left["again"]
        assert left["steps"] == left["recorded"] == 1


# Checkpoints.


def test_an_interrupted_run_is_repeated_bit_for_bit(pair: Any) -> None:
    for rank in pair:
        saved = rank["saved"]
        assert saved["extra"] == saved["folders"] == 1
        assert equal(saved["repeated"][:2], saved["first"][2:])
        assert len(saved["repeated"]) == 4


def test_whole_and_sharded_runs_go_on_from_each_other(pair: Any) -> None:
    for rank in pair:
        assert equal(rank["saved"]["bare"], rank["saved"]["end"])
        assert equal(rank["saved"]["sharded again"], rank["saved"]["end"])


def test_damaged_shards_are_refused_by_all(pair: Any) -> None:
    said = [rank["saved"]["damaged"] for rank in pair]
    assert sum("DamagedFile: " in refusal and refusal.startswith("DamagedFile") for refusal in said) == 1
    assert sum(refusal.startswith("RankFailed") for refusal in said) == 1


def test_one_process_goes_on_where_two_ranks_stopped(pair: Any, folder: Path) -> None:
    model, optimizer, private = begin_dropout(shard=False)
    private.load_checkpoint(folder / "sharded.pt", reseed=True)
    assert private.steps_taken == private.ledger.steps == 6
    assert all(tensor.isfinite().all() for tensor in state(model, optimizer))
    private.detach()


def test_an_index_that_asks_for_code_is_refused(tmp_path: Path) -> None:
    import pickle

    from clipless.distributed.saving import _Unpickler

    (tmp_path / "index").write_bytes(pickle.dumps(Path.unlink))
    with open(tmp_path / "index", "rb") as file, pytest.raises(clipless.DamagedFile, match="is no part of one"):
        _Unpickler(file).load()
