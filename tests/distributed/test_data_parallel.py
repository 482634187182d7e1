"""Several processes make one private run: real processes, real groups, against the same run in one process."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
from open_runs import OPEN, gone_on
from scenarios import CASES, WORLDS, cases_of
from shared_run import BATCH, SIZE, released, steps
from torch import Tensor
from worlds import world

from clipless import read_ledger

SIZES = list(WORLDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("everything")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[Any, Any]]:
    """What four processes gave, which are started once; two of them are killed in the end."""
    return world("everything", 4, folder)


@pytest.fixture(scope="module")
def said(ranks: list[dict[Any, Any]]) -> dict[int, list[dict[str, Any]]]:
    """For each world what its ranks gave."""
    return {size: [ranks[member][size] for member in members] for size, members in WORLDS.items()}


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """How far two gradients are from each other, relative to the norm of the second."""
    flat = [torch.cat([tensor.flatten().double() for tensor in tensors]) for tensors in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def equal(one: Any, other: Any) -> bool:
    """The same, to the last bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize(("name", "groups"), CASES)
def test_the_run_is_that_of_one_process(said: Any, name: str, groups: str) -> None:
    """Every clipping and partition, whole batches and parts; about a fifth of the local batches are empty."""
    alone = scenarios.case(name, groups)
    for size in [size for size in SIZES if (name, groups) in cases_of(size)]:
        for rank in said[size]:
            found = rank[f"{name} {groups}"]
            for step in range(3):
                assert distance(found["gradients"][step], alone["gradients"][step]) < 1e-6
            assert torch.allclose(found["thresholds"], alone["thresholds"], rtol=1e-5)
            for key in ("ledger", "spent", "plan"):
                assert found[key] == alone[key]


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_have_the_same_bits(said: Any, size: int) -> None:
    first, *others = said[size]
    for name in [*(f"{name} {groups}" for name, groups in cases_of(size)), "secure", "noise"]:
        for rank in others:
            assert equal(first[name], rank[name]), name


@pytest.mark.parametrize("size", SIZES)
def test_noise_enters_once(said: Any, size: int) -> None:
    """On gradients of zero the release is the noise: the single process's, bit for bit, and of the plan's variance. Of
    12,288 numbers the variance is within 6.5 of its standard errors, 8.3 %, in all but one of 10**10 seeds."""
    alone = scenarios.pure_noise()
    assert equal(said[size][0]["noise"]["gradients"], alone["gradients"])
    noise = torch.cat([step[0].flatten() for step in said[size][0]["noise"]["gradients"]]).double()
    stddev = 1.5 * 1.0 / BATCH  # multiplier, threshold, expected batch
    assert abs(float(noise.var()) / stddev**2 - 1) < 6.5 * math.sqrt(2 / len(noise))


@pytest.mark.parametrize("size", SIZES)
def test_the_batches_of_the_ranks_are_one_poisson_batch(said: Any, size: int) -> None:
    (alone,), parts = [scenarios.batches()], [rank["batches"] for rank in said[size]]
    assert len(alone) == 12
    for number, whole in enumerate(alone):
        assert sorted(record for part in parts for record in part[number]) == sorted(whole)
        assert max(len(part[number]) for part in parts) <= math.ceil(len(whole) / size)
    assert any(not part[number] and alone[number] for part in parts for number in range(12))


def test_secure_noise_is_shared_and_not_repeated(said: Any) -> None:
    first = [said[size][0]["secure"]["gradients"][0] for size in SIZES]
    assert not equal(first[0], first[1])


@pytest.mark.parametrize("name", ["broadcast", "ddp", "ddp in parts"])
def test_weights_of_the_first_rank(said: Any, name: str) -> None:
    """Broadcast as asked, or by DistributedDataParallel, which then sends nothing more."""
    alone = released(micro=1 if "parts" in name else None)
    for rank in said[2]:
        assert distance(rank[name]["gradients"][2], alone["gradients"][2]) < 1e-6
        assert distance(rank[name]["weights"], alone["weights"]) < 1e-6
        assert rank[name]["plan"] == alone["plan"]
    assert equal(*(rank[name] for rank in said[2]))


def test_a_detached_model_is_reduced_by_its_wrapper_again(said: Any) -> None:
    one, other = (rank["plain again"] for rank in said[2])
    assert equal(one, other)
    assert any(grad.any() for grad in one)


def test_alone_means_alone(said: Any) -> None:
    for number, rank in enumerate(said[2]):
        assert equal(rank["alone"], released(seed=number))


def test_removing_a_record_moves_the_mean_by_its_threshold(said: Any) -> None:
    """The first record is on the first rank, the last on the other: the sum moves by no more than the threshold, 1."""
    for rank in said[2]:
        whole, *less = rank["without a record"]
        for rest in less:
            change = torch.cat([(a - b).flatten() for a, b in zip(whole, rest, strict=True)]).double().norm() * SIZE
            assert 0.9 < float(change) < 1 + 1e-3


REFUSED = {
    "weights": r"the content of parameter '0.weight' differs between rank 0 and rank 1\..*broadcast_weights",
    "seed": r"the seed differs between rank 0 and rank 1\.",
    "seed on one": r"the seed differs between rank 0 and rank 1\.",
    "noise": r"the plan's epsilon differs between rank 0 and rank 1 \(0\.\d+, 0\.\d+\)",
    "length": r"the length of the data set differs .*\(60, 59\)",
    "secret length": r"the number of records differs between rank 0 and rank 1\. ",
    "parameters": r"the plan's groups differs",
    "clipping": r"the plan's clipping differs",
    "optimizer": r"the optimizer's group 0 differs .*'lr': 0\.1.*'lr': 1\.1",
    "not a group": r"InvalidType: group must be a process group of torch\.distributed",
    "inside": r"module '0' is wrapped in DistributedDataParallel.*wrap the whole model, or nothing",
    "static graph": r"Misuse: DistributedDataParallel with static_graph",
    "alone and wrapped": r"Misuse: .*group=False says that this process trains alone",
    "afterwards": r"not refused",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_differs_is_refused_by_name(said: Any, what: str) -> None:
    for rank in said[2]:
        assert re.search(REFUSED[what], rank["refused"][what]), rank["refused"][what]


NOT_GIVEN = r"Misuse: the model runs in a DistributedDataParallel that make_private was not given.*\(0 steps\)"
COPIES = r"Misuse: the model runs in DataParallel, which runs copies.*fully_shard before make_private.*\(0 steps\)"
LATER = r"Misuse: the model was put into FullyShardedDataParallel or fully_shard after make_private.*\(0 steps\)"
OLD = r"Misuse: the model is wrapped in FullyShardedDataParallel.*shard with fully_shard"
WRAPPED = {
    "ddp, before": r"not refused",
    "ddp, unused parameters, before": r"not refused",
    "data parallel, before": r"wrapped in DataParallel.*the model inside \(model\.module\)",
    "fsdp1, before": OLD,
    "fsdp1, original parameters, before": OLD,
    "fsdp1, not sharded, before": OLD,
    "fully_shard, before": r"not refused",
    "fully_shard, copies, before": r"Misuse: parameter '0\.weight' is placed as \(Replicate\(\), Shard",
    "tensor parallel, before": r"Misuse: parts of the model are sharded or tensor-parallel",
    "compiled, before": r"UnsupportedModule: .*is compiled by torch\.compile",
    "ddp, after": NOT_GIVEN,
    "ddp, unused parameters, after": NOT_GIVEN,
    "data parallel, after": COPIES,
    "fsdp1, after": LATER,
    "fsdp1, original parameters, after": LATER,
    "fsdp1, not sharded, after": LATER,
    "fully_shard, after": LATER,
    "fully_shard, copies, after": LATER,
    "tensor parallel, after": r"Misuse: module '0' got another child or parameter after make_private.*\(0 steps\)",
    "compiled, after": r"Misuse: the model is run by torch\.compile.*\(0 steps\)",
    "ddp, given what is inside": NOT_GIVEN,
    "ddp, alone and after": NOT_GIVEN,
    "data parallel, alone and after": COPIES,
    "fsdp1, after a step": r"Misuse: the model runs in FullyShardedDataParallel.*fully_shard before.*\(6 steps\)",
    "zero": r"InvalidArgument: ZeroRedundancyOptimizer .* give make_private a plain one.*fully_shard",
    "local sgd": r"InvalidType: PostLocalSGDOptimizer wraps another optimizer",
}


@pytest.mark.parametrize("what", WRAPPED)
def test_what_the_model_is_wrapped_in_is_refused_by_name(said: Any, what: str) -> None:
    """Or it makes no difference; what comes after make_private is refused before anything of it is released."""
    for rank in said[2]:
        assert re.search(WRAPPED[what], rank["wrapped"][what]), rank["wrapped"][what]
        assert rank["wrapped"].keys() == WRAPPED.keys()


@pytest.mark.parametrize("what", ["averaged", "in buckets", "joined"])
def test_what_makes_no_difference(said: Any, what: str) -> None:
    for rank in said[2]:
        assert distance(rank[what], released()["weights"]) < 1e-6


# People in a hurry.


@pytest.mark.parametrize("what", ["other parts", "looks", "looks in a wrapper", "fails", "workers"])
def test_what_one_rank_does_alone_and_may(said: Any, what: str) -> None:
    """The run is that of one process."""
    for rank in said[2]:
        assert distance(rank["hurried"]["weights"][what], released()["weights"]) < 1e-6


HURRIED = {
    "learns faster": (r"RankFailed: the ranks do not have the same at the release of step 3.*learning rate", 2),
    "accumulates": (r"Misuse: a new batch was asked for before step\(\)", 0),
    "saves": (r"RankFailed: the ranks do not do the same: rank 0 is at save_checkpoint, rank 1 is at step 2", 1),
}


@pytest.mark.parametrize("what", HURRIED)
def test_what_one_rank_does_alone_and_may_not(said: Any, what: str) -> None:
    pattern, steps_taken = HURRIED[what]
    for rank in said[2]:
        refusal, recorded = rank["hurried"][what]
        assert re.search(pattern, refusal), refusal
        assert recorded == steps_taken


OTHER_RECORDS = (
    r"InvalidArgument: the ranks do not have the same records: one record is another one.*with the same seed"
)
RECORDS = {
    "split by each rank": OTHER_RECORDS,
    "divided": OTHER_RECORDS,
    "split alike": r"^not refused$",
    "augmented": r"^not refused$",
    "not readable": r"^not refused$",
    "not readable on one": r"^not refused$",
}


@pytest.mark.parametrize("what", RECORDS)
def test_ranks_have_the_same_records(said: Any, what: str) -> None:
    """If one record had two numbers, it could be in a batch twice."""
    for rank in said[2]:
        assert re.search(RECORDS[what], rank["hurried"]["records"][what]), rank["hurried"]["records"][what]


def test_records_that_cannot_be_compared_are_warned_of_once(said: Any) -> None:
    first, second = (rank["hurried"]["records"]["augmented in its own way"] for rank in said[2])
    assert re.search(r"^not refused the ranks' records could not be compared", first), first
    assert second == "not refused"


def test_what_one_rank_refuses_no_rank_does(said: Any) -> None:
    first, second = (rank["refused"] for rank in said[2])
    assert second["one rank's argument"].startswith("InvalidArgument: unknown clipping 'abada'")
    assert (
        "RankFailed: another rank could not go on at make_private, so none does (rank 1: Inval"
        in first["one rank's argument"]
    )
    assert second["one rank's model"].startswith("UnsupportedModule: BatchNorm1d")
    assert first["one rank's model"].startswith("RankFailed: another rank could not go on at make_private")


def test_a_rank_that_cannot_step_stops_all_and_all_can_go_on(said: Any) -> None:
    first, second = (rank["failures"] for rank in said[2])
    assert first["no backward"].startswith(
        "RankFailed: another rank could not go on at step 1, so none does (rank 1: Misuse: step()"
    )
    assert second["no backward"].startswith("Misuse: step() without its backward()")
    assert "the last batch from private.loader was not stepped" in second["skipped"]
    assert first["step after skipping"].startswith("RankFailed: another rank could not go on at step 2")
    for rank in (first, second):
        assert rank["went on"] == 1
        assert "the ranks do not do the same: rank 0 is at step 2, rank 1 is at save_to." in rank["another call"]
        assert rank["still open"] == "not refused"


def test_ranks_that_would_step_differently_are_stopped(said: Any) -> None:
    for rank in said[2]:
        assert "the ranks do not have the same at the release of step 3" in rank["failures"]["other noise"]
        assert rank["failures"]["steps before"] == 2
        assert "the ranks do not have the same at the release of step 3" in rank["failures"]["diverged"]
        assert rank["failures"]["steps"] == 2
        assert "the ranks do not have the same at the release of step 4" in rank["failures"]["other weights"]
        assert rank["failures"]["steps at last"] == 3


def test_a_ledger_that_cannot_be_written_stops_all_ranks(said: Any) -> None:
    first, second = (rank["left"] for rank in said[2])
    assert first["no folder"].startswith("InvalidArgument: cannot write the ledger")
    assert second["no folder"].startswith("RankFailed: another rank could not go on at save_to")
    assert not first["file"]
    assert first["cannot write"].startswith("Misuse: cannot write to the ledger")
    assert second["cannot write"].startswith("RankFailed: another rank could not go on at the release of step 2")


def test_a_rank_outside_the_group_is_refused(ranks: Any) -> None:
    outside = [rank["outside"] for number, rank in enumerate(ranks) if number not in WORLDS[2]]
    assert len(outside) == 2
    assert all("InvalidArgument: this rank is not in the group" in refusal for refusal in outside)


def test_a_rank_that_hangs_stops_the_others_at_the_time_out(ranks: Any) -> None:
    waiting, hanging, *_ = (rank["hanging"] for rank in ranks)
    assert waiting["refused"].startswith("RankFailed: the other ranks could not be reached at step 2")
    assert waiting["steps"] == hanging["steps"] == 1


def test_a_rank_that_is_killed_stops_the_others(ranks: Any) -> None:
    assert all("killed" not in ranks[number] for number in (1, 3))
    recorded, reducing = (ranks[number]["killed"] for number in (0, 2))
    assert reducing["refused"].startswith("RankFailed: the other ranks could not be reached at the sum over the ranks")
    assert recorded["refused"].startswith("RankFailed: the other ranks could not be reached at the release of step 2")
    assert recorded["steps"] == recorded["recorded"] == 2
    assert reducing["steps"] == reducing["recorded"] == 1
    for said in (recorded, reducing):
        assert "stays counted" in said["refused"]
        assert said["unchanged"]
        assert "the other ranks were lost" in said["again"]


# Checkpoints.


@pytest.fixture(scope="module")
def resumed(folder: Path, ranks: Any) -> list[dict[str, Any]]:
    """What two processes made of the runs that lost a rank, and of one that a single process began."""
    model, optimizer, private = scenarios.begin_dropout(rank=0)
    private.save_to(folder / "alone.jsonl")
    for number, _ in enumerate(steps(model, optimizer, private)):
        if number == 1:
            private.save_checkpoint(folder / "alone.pt")
            break
    private.detach()
    for ranks_now in ("one", "three"):
        for kind in OPEN:
            shutil.copytree(folder / kind, folder / ranks_now / kind)
    return world("resumed", 3, folder)


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("ranks_now", ["one", "three"])
def test_a_run_of_two_ranks_that_were_killed_goes_on_with_another_number(
    resumed: Any, folder: Path, kind: str, ranks_now: str
) -> None:
    """If no step was lost, as if nothing had happened. A lost step is repeated only if it is the same to the last bit, which
    shards of another size never are; given up, it stays counted."""
    found = [rank[kind] for rank in resumed] if ranks_now == "three" else [gone_on(folder / ranks_now / kind)]
    alone = released(steps=6)
    for rank in found:
        assert rank["begun"] == 3
        assert len(rank["gradients"]) == 3
        assert rank["steps"] == 6
        for step in range(3):
            assert distance(rank["gradients"][step], alone["gradients"][3 + step]) < 1e-6
        assert distance(rank["weights"], alone["weights"]) < 1e-6
        assert rank["repeated"].startswith(("ReplayDiffers", "RankFailed", *(["not refused"] * (kind == "whole"))))
        assert rank["given up"] in ([3, 3, 6], [4, 2, 6])
    assert len(found) == {"one": 1, "three": 3}[ranks_now]
    for lost in (0, 1):
        assert read_ledger(folder / ranks_now / kind / f"{lost}.jsonl").ledger().steps == 6


@pytest.fixture(scope="module")
def again(resumed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the two of them said that went on with runs of two."""
    return resumed[:2]


@pytest.mark.parametrize("name", ["recording", "add_up"])
def test_a_run_that_lost_a_rank_goes_on(again: Any, folder: Path, name: str) -> None:
    """From its first checkpoint: recorded steps are repeated at no cost, and each must be what was recorded."""
    done = 2 if name == "recording" else 1
    for rank in again:
        assert rank[name]["extra"] == "begun"
        assert rank[name]["counts"] == [0, done]
        assert len(rank[name]["gradients"]) == rank[name]["spent"] == 6
    assert equal(*(rank[name] for rank in again))
    assert read_ledger(folder / f"{name}.jsonl").recorded().steps == 6


def test_an_interrupted_run_is_repeated_bit_for_bit(again: Any) -> None:
    for number, rank in enumerate(again):
        said = rank["interrupted"]
        assert said["pending"] == 3
        assert equal(said["again"][:3], said["whole"][2:])
        assert len(said["again"]) == 4
        assert said["steps"] == 6
        assert (said["left"] is None) == (number > 0)


def test_a_repeated_step_that_differs_is_shown_on_no_rank(again: Any) -> None:
    first, second = (rank["interrupted"]["differs"] for rank in again)
    assert first.startswith("ReplayDiffers")
    assert second.startswith("RankFailed: another rank could not go on at the release of step 3")


def test_two_ranks_go_on_where_one_process_stopped(again: Any) -> None:
    for rank in again:
        assert rank["of one process"] == [2, 4]


def test_one_process_goes_on_where_two_ranks_stopped(again: Any, folder: Path) -> None:
    model, optimizer, private = scenarios.begin_dropout(rank=0)
    private.load_checkpoint(folder / "last.pt")
    assert private.steps_taken == private.ledger.steps == 3
    assert len(list(steps(model, optimizer, private))) == 3
    private.detach()


def test_ranks_load_one_checkpoint_or_none(again: Any) -> None:
    first, second = again
    for rank in again:
        assert "the ranks do not have the same at load_checkpoint" in rank["other file"]
        assert rank["nothing changed"] == 0
        assert rank["reseeded"] == [6, 6]
    assert equal(first["new keys"], second["new keys"])
    assert second["missing on one"].startswith("InvalidArgument: cannot read the checkpoint")
    assert first["missing on one"].startswith("RankFailed: another rank could not go on at load_checkpoint")
