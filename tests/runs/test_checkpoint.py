"""Checkpoints: one file that is whole or refused, and that fits its ledger, plan, data, model and optimizer only."""

import copy
import io
import os
import pickle
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clipless.errors import BudgetSpent, DamagedFile, InvalidArgument, LedgerInUse, Misuse, ReplayDiffers
from clipless.noise.adding import grid
from clipless.runs import checkpoint
from clipless.runs.fingerprint import fingerprint
from clipless.runs.ledger_file import read_ledger
from small_run import STEPS, Run, begin, dataset


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint after 4 steps, with a ledger of 7."""
    run = begin()
    run.private.save_to(tmp_path / "ledger.jsonl")
    run.go(4).save(tmp_path / "run.pt")
    run.go(3).close()
    return tmp_path / "run.pt"


@pytest.fixture(scope="module")
def whole() -> Run:
    """The run that was never interrupted."""
    return begin().go().close()


def test_an_interrupted_run_ends_like_one_that_was_not(saved: Path, whole: Run) -> None:
    ledger = (saved.parent / "ledger.jsonl").read_bytes()
    run = begin(seed=99).load(saved)
    assert (run.private.ledger.steps, run.private.steps_taken) == (7, 4)
    run.go(3)
    assert (saved.parent / "ledger.jsonl").read_bytes() == ledger
    run.go().close()
    assert torch.equal(run.weights(), whole.weights())
    assert run.private.ledger == whole.private.ledger
    assert read_ledger(saved.parent / "ledger.jsonl").ledger() == whole.private.ledger


def test_spending_is_that_of_the_ledger_on_disk_while_steps_are_repeated(saved: Path) -> None:
    run = begin(seed=99).load(saved)
    assert run.private.spent().steps == 7
    run.go(2)
    assert run.private.spent().steps == 7
    assert run.private.ledger_file is not None
    assert run.private.ledger_file["position"] == 6
    run.close()


def test_a_run_can_be_saved_while_it_repeats_steps(saved: Path, whole: Run) -> None:
    begun = begin(seed=99).load(saved).go(1)
    begun.save(saved)
    begun.close()
    run = begin(seed=99).load(saved)
    assert (run.private.steps_taken, run.private.ledger.steps) == (5, 7)
    assert torch.equal(run.go().close().weights(), whole.weights())


def test_the_budget_is_the_plans_after_any_number_of_interruptions(saved: Path) -> None:
    run = begin(seed=99).load(saved).go()
    with pytest.raises(BudgetSpent):
        next(iter(run.private.loader))
    assert run.close().private.ledger.steps == STEPS


def test_global_random_states_are_restored(tmp_path: Path) -> None:
    run = begin()
    run.private.save_to(tmp_path / "ledger.jsonl")
    random.seed(1)
    np.random.seed(2)
    run.save(tmp_path / "run.pt")
    expected = random.random(), np.random.rand(), np.random.randn(), torch.rand(1)
    run.close()
    begin().load(tmp_path / "run.pt").close()
    assert (random.random(), np.random.rand(), np.random.randn(), torch.rand(1)) == expected


def test_the_folder_may_be_moved(saved: Path, whole: Run) -> None:
    elsewhere = saved.parent.with_name("elsewhere")
    saved.parent.rename(elsewhere)
    assert torch.equal(begin().load(elsewhere / "run.pt").go().close().weights(), whole.weights())
    ledger = elsewhere / "ledger.jsonl"
    ledger.rename(elsewhere / "other name")
    assert begin().load(elsewhere / "run.pt", ledger=elsewhere / "other name").close().private.ledger.steps == STEPS


def test_only_the_owner_may_read_it_and_nothing_is_left_beside(saved: Path) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert sorted(os.listdir(saved.parent)) == ["ledger.jsonl", "run.pt"]


def test_a_part_of_a_killed_save_is_swept_up(saved: Path) -> None:
    (saved.parent / ".run.pt.123.part").write_bytes(b"half")
    run = begin().load(saved)
    run.save(saved)
    run.close()
    assert sorted(os.listdir(saved.parent)) == ["ledger.jsonl", "run.pt"]


def test_saving_in_the_middle_of_a_batch_is_refused(tmp_path: Path) -> None:
    run = begin()
    run.private.save_to(tmp_path / "ledger.jsonl")
    x, _ = next(iter(run.private.loader))
    with pytest.raises(Misuse, match=r"save after optimizer\.step"):
        run.save(tmp_path / "run.pt")
    run.model(x)
    with pytest.raises(Misuse, match=r"save after optimizer\.step"):
        run.save(tmp_path / "run.pt")
    run.close()
    assert os.listdir(tmp_path) == ["ledger.jsonl"]


def test_saving_without_a_ledger_or_after_detach_is_refused(tmp_path: Path) -> None:
    run = begin()
    with pytest.raises(Misuse, match="save_to"):
        run.save(tmp_path / "run.pt")
    run.private.save_to(tmp_path / "ledger.jsonl")
    run.close()
    with pytest.raises(Misuse, match="before detach"):
        run.save(tmp_path / "run.pt")


def test_a_run_has_one_ledger(tmp_path: Path) -> None:
    run = begin().go(2)
    run.private.save_to(tmp_path / "ledger.jsonl")
    assert read_ledger(tmp_path / "ledger.jsonl").ledger() == run.private.ledger
    with pytest.raises(Misuse, match="one ledger"):
        run.private.save_to(tmp_path / "more.jsonl")
    other = begin()
    with pytest.raises(InvalidArgument, match="choose another file"):
        other.private.save_to(tmp_path / "ledger.jsonl")
    run.close()


class Strange:
    pass


def test_extra_state_that_could_not_be_loaded_is_refused_when_saved(tmp_path: Path) -> None:
    run = begin()
    run.private.save_to(tmp_path / "ledger.jsonl")
    with pytest.raises(InvalidArgument, match=r"Strange.*state_dict\(\)s"):
        run.private.save_checkpoint(tmp_path / "run.pt", extra=Strange())
    run.close()
    assert os.listdir(tmp_path) == ["ledger.jsonl"]


# What does not belong together.


def state_of(run: Run) -> list[Any]:
    """Everything that loading could have changed, as plain values."""
    momentum = [state["momentum_buffer"].tolist() for state in run.optimizer.state.values()]
    state = run.private.state_dict()
    kept = copy.deepcopy([state["ledger"], state["draws"], str(state["noise"])])
    return [run.weights().tolist(), momentum, torch.get_rng_state().tolist(), *kept]


def refused(run: Run, path: Path, error: Any, message: str, **options: Any) -> None:
    """Loading raises and changes nothing."""
    before = state_of(run)
    with pytest.raises(error, match=message):
        run.load(path, **options)
    assert state_of(run) == before
    run.close()


OTHERS: dict[str, tuple[Callable[[], Run], str]] = {
    "plan": (lambda: begin(noise_multiplier=1.1), "another plan.*noise_multiplier"),
    "delta": (lambda: begin(delta=1e-6), "another plan.*delta"),
    "steps": (lambda: begin(steps=STEPS + 1), "another plan.*steps"),
    "clipping": (lambda: begin(clipping="abadi"), "another plan.*clipping"),
    "data set size": (lambda: begin(data=dataset(61)), "another plan.*dataset_size"),
    "noise source": (lambda: begin(seed=None), "another plan.*noise"),
    "wider model": (lambda: begin(hidden=8), "another plan|another model"),
    "other optimizer": (lambda: begin(optimizer=lambda p: torch.optim.Adam(p)), "another optimizer.*SGD.*Adam"),
    "other groups": (
        lambda: begin(optimizer=lambda p: torch.optim.SGD([{"params": [q]} for q in p], lr=0.1)),
        "another optimizer",
    ),
}


@pytest.mark.parametrize(("make", "message"), OTHERS.values(), ids=OTHERS)
def test_another_run_is_refused_and_left_as_it_was(saved: Path, make: Callable[[], Run], message: str) -> None:
    refused(make(), saved, InvalidArgument, message)
    begin().load(saved).close()


def test_a_model_with_other_buffers_is_refused(saved: Path) -> None:
    run = begin()
    run.model.register_buffer("extra", torch.zeros(3))
    refused(run, saved, InvalidArgument, "another model.*extra")


def test_the_ledger_of_another_run_is_refused(saved: Path, tmp_path: Path) -> None:
    other = begin()
    other.private.save_to(tmp_path / "other.jsonl")
    other.go(7).close()
    refused(begin(), saved, InvalidArgument, "another run", ledger=tmp_path / "other.jsonl")


@pytest.mark.parametrize("lines", [0, 2, 4])
def test_an_older_ledger_is_refused(saved: Path, lines: int) -> None:
    ledger = saved.parent / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:lines]))
    refused(begin(), saved, (InvalidArgument, DamagedFile), "older than the checkpoint|line 1")


def test_an_edited_ledger_is_refused(saved: Path) -> None:
    ledger = saved.parent / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"line": 6', b'"line": 5'))
    refused(begin(), saved, DamagedFile, "line 7")


def test_a_missing_ledger_is_refused(saved: Path) -> None:
    (saved.parent / "ledger.jsonl").unlink()
    refused(begin(), saved, InvalidArgument, "missing")


def test_a_ledger_in_use_is_refused(saved: Path) -> None:
    first = begin().load(saved)
    refused(begin(), saved, LedgerInUse, "another process")
    first.close()


def test_loading_after_training_began_is_refused(saved: Path, tmp_path: Path) -> None:
    refused(begin().go(1), saved, Misuse, "fresh make_private")
    run = begin()
    run.private.save_to(tmp_path / "second.jsonl")
    refused(run, saved, Misuse, "fresh make_private")


# Repeating what differs.


@pytest.mark.parametrize("change", ["learning rate", "loss", "weights", "data"])
def test_a_repeated_step_that_differs_is_refused_before_anything_is_seen(saved: Path, change: str) -> None:
    data = dataset()
    if change == "data":
        data.tensors[0].mul_(1.5)
    run = begin(data=data).load(saved)
    if change == "learning rate":
        run.optimizer.param_groups[0]["lr"] *= 2
    if change == "weights":
        with torch.no_grad():
            next(run.model.parameters())[0, 0] += 1.0
    ledger = (saved.parent / "ledger.jsonl").read_bytes()
    smoothing = 0.5 if change == "loss" else 0.0
    repeated = 1 if change == "learning rate" else 0  # a new rate shows in the gradient of the step after it
    for number, (x, y) in enumerate(run.private.loader):
        before = run.weights()
        run.optimizer.zero_grad()
        nn.functional.cross_entropy(run.model(x), y, label_smoothing=smoothing).backward()
        if number == repeated:
            break
        run.optimizer.step()
    with pytest.raises(ReplayDiffers, match="nothing was released.*reseed=True"):
        run.optimizer.step()
    assert torch.equal(run.weights(), before)
    assert all(p.grad is None for p in run.model.parameters())
    assert (saved.parent / "ledger.jsonl").read_bytes() == ledger
    run.close()


@pytest.mark.parametrize("number", range(4))
def test_a_repeated_step_in_which_one_parameter_differs_is_refused(tmp_path: Path, number: int) -> None:
    """Any of them, by the least that can differ: one step of the grid in one number."""
    run = begin()
    run.private.save_to(tmp_path / "ledger.jsonl")
    run.go(2).save(tmp_path / "run.pt")
    run.go(1).close()
    changed = begin().load(tmp_path / "run.pt")
    release = changed.private._source.release

    def other(
        stream: str, step: int, values: list[Tensor], stddevs: list[float], divisor: float, *further: Any, **more: Any
    ) -> list[Tensor]:
        released = release(stream, step, values, stddevs, divisor, *further, **more)
        released[number].view(-1)[-1] += grid(stddevs[number]) / divisor
        return released

    changed.private._source.release = other  # type: ignore[method-assign]
    with pytest.raises(ReplayDiffers, match="nothing was released"):
        changed.go(1)
    assert all(parameter.grad is None for parameter in changed.model.parameters())
    changed.close()


@pytest.mark.parametrize("clipping", ["dc-p", "dc-e", "quantile"])
def test_a_repeated_step_with_another_statistic_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clipping: str
) -> None:
    """The gradients are the same to the bit: the statistic of the same batch is part of what was released."""
    run = begin(clipping=clipping)
    run.private.save_to(tmp_path / "ledger.jsonl")
    run.go(4).save(tmp_path / "run.pt")
    run.go(3).close()
    ledger = (tmp_path / "ledger.jsonl").read_bytes()
    policy = type(run.private.plan.clipping.policy)
    observe = policy.observe
    monkeypatch.setattr(policy, "observe", lambda self, state, norms: observe(self, state, norms) + 1)
    changed = begin(clipping=clipping).load(tmp_path / "run.pt")
    with pytest.raises(ReplayDiffers, match="nothing was released"):
        changed.go(1)
    changed.close()
    monkeypatch.undo()
    again = begin(clipping=clipping).load(tmp_path / "run.pt").go(3)
    assert torch.equal(again.weights(), run.weights())
    assert (tmp_path / "ledger.jsonl").read_bytes() == ledger
    again.close()


def test_reseeding_leaves_the_lost_steps_counted_and_takes_new_noise(saved: Path, whole: Run) -> None:
    run = begin(lr=0.3).load(saved, reseed=True)
    assert (run.private.steps_taken, run.private.ledger.steps) == (7, 7)
    assert run.private.state_dict()["noise"]["seed"] not in (5, None)
    run.go()
    assert run.private.ledger.steps == STEPS
    assert run.private.loader.draws == 4 + (STEPS - 7)
    run.close()
    assert not torch.equal(run.weights(), whole.weights())
    prints = [entry.fingerprint for entry in read_ledger(saved.parent / "ledger.jsonl").entries]
    assert len(set(prints)) == len(prints) == STEPS


def test_reseeding_counts_a_torn_line(saved: Path) -> None:
    ledger = saved.parent / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-25])
    run = begin().load(saved, reseed=True)
    assert run.private.ledger.steps == read_ledger(ledger).ledger().steps == 7
    run.go().close()
    assert read_ledger(ledger).ledger().steps == STEPS


@pytest.mark.parametrize("cut", [1, 25, 300])
def test_a_torn_line_is_completed_by_repeating_its_step(saved: Path, whole: Run, cut: int) -> None:
    ledger = saved.parent / "ledger.jsonl"
    content = ledger.read_bytes()
    ledger.write_bytes(content[:-cut])
    run = begin().load(saved)
    assert run.private.ledger.steps == 6
    run.go(3)
    assert ledger.read_bytes() == content
    assert torch.equal(run.go().close().weights(), whole.weights())


def test_a_torn_line_with_another_gradient_is_refused(saved: Path) -> None:
    ledger = saved.parent / "ledger.jsonl"
    torn = ledger.read_bytes()[:-25]
    ledger.write_bytes(torn)
    run = begin().load(saved).go(2)
    with torch.no_grad():
        next(run.model.parameters())[0, 0] += 1.0
    with pytest.raises(ReplayDiffers):
        run.go(1)
    assert ledger.read_bytes() == torn
    run.close()


def test_secure_noise_repeats_lost_steps_bit_for_bit(tmp_path: Path) -> None:
    run = begin(seed=None)
    run.private.save_to(tmp_path / "ledger.jsonl")
    run.go(4).save(tmp_path / "run.pt")
    lost = run.go(3).weights()
    run.close()
    resumed = begin(seed=None).load(tmp_path / "run.pt")
    assert (resumed.private.steps_taken, resumed.private.ledger.steps) == (4, 7)
    assert torch.equal(resumed.go(3).weights(), lost)
    assert (resumed.private.steps_taken, resumed.private.ledger.steps) == (7, 7)
    resumed.go()
    with pytest.raises(BudgetSpent):
        next(iter(resumed.private.loader))
    resumed.close()
    assert read_ledger(tmp_path / "ledger.jsonl").ledger().steps == STEPS


# The file itself.


def test_no_code_is_run_from_a_file(saved: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "pwned"),))

    buffer = io.BytesIO()
    torch.save({"model": Evil()}, buffer)
    for payload in (buffer.getvalue(), pickle.dumps(Evil(), protocol=2)):
        digest = checkpoint.hashlib.sha256(payload).hexdigest()
        saved.write_bytes(f"clipless-checkpoint 1 {digest}\n".encode() + payload)
        with pytest.raises(DamagedFile, match="does not hold a valid checkpoint"):
            checkpoint.read_checkpoint(saved)
    assert not (tmp_path / "pwned").exists()


def test_another_version_and_another_file_are_refused(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes().replace(b"clipless-checkpoint 1", b"clipless-checkpoint 2", 1))
    with pytest.raises(InvalidArgument, match="version 2"):
        checkpoint.read_checkpoint(saved)
    saved.write_bytes(b"")
    with pytest.raises(DamagedFile, match="not a clipless checkpoint"):
        checkpoint.read_checkpoint(saved)
    with pytest.raises(InvalidArgument, match="cannot read"):
        checkpoint.read_checkpoint(saved.with_name("nowhere"))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("fuzzed")
    run = begin()
    run.private.save_to(folder / "ledger.jsonl")
    run.go(2).save(folder / "run.pt")
    run.close()
    return folder / "run.pt", (folder / "run.pt").read_bytes()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_change_of_the_bytes_is_refused(fuzzed: tuple[Path, bytes], data: st.DataObject) -> None:
    """Flips, cuts, insertions, exchanged and repeated blocks, and more of it behind the end: always an error."""
    path, original = fuzzed
    at = data.draw(st.one_of(st.integers(0, 120), st.integers(0, len(original) - 1)))
    size = data.draw(st.integers(1, 200))
    block = original[at : at + size]
    changed = data.draw(
        st.sampled_from(
            [
                original[:at] + bytes([original[at] ^ (1 << data.draw(st.integers(0, 7)))]) + original[at + 1 :],
                original[:at],
                original[:at] + data.draw(st.binary(min_size=1, max_size=9)) + original[at:],
                original[:at] + original[at + size :],
                original[:at] + block + original[at:],
                original + block,
                original[at:] + original[:at],
            ]
        )
    )
    if changed == original:
        return
    path.write_bytes(changed)
    with pytest.raises((DamagedFile, InvalidArgument)):
        checkpoint.read_checkpoint(path)


# Fingerprints.


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20_000), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    data=st.data(),
)
def test_a_fingerprint_sees_every_bit(sizes: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    known = fingerprint(tensors)
    assert known == fingerprint([t.clone() for t in tensors])
    which = data.draw(st.integers(0, len(sizes) - 1))
    if sizes[which]:
        raw = tensors[which].view(torch.uint8)
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
        assert fingerprint(tensors) != known


def test_a_fingerprint_sees_order_shape_and_type() -> None:
    x = torch.randn(64, 1024)
    same = [x, x.clone(), x.t().contiguous().t()]
    other = [x.flip(0), x.flip(1), x.t(), x.reshape(-1), x.view(torch.int32), x[:, torch.randperm(1024)], -x]
    assert len({fingerprint([t]) for t in same}) == 1
    assert len({fingerprint([t]) for t in [x, *other]}) == 1 + len(other)
    assert fingerprint([x, -x]) != fingerprint([-x, x])
    numbers = torch.arange(2.0**13, dtype=torch.float64)  # 32 rows of words
    for one, other in ((3, 250), (3, 3 + 256)):  # of one row, and of one column
        exchanged = numbers.clone()
        exchanged[[one, other]] = numbers[[other, one]]
        assert fingerprint([exchanged]) != fingerprint([numbers])
