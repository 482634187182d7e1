"""A private run in JAX: the numbers of a torch run, and what is refused."""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax_problem import BATCH, PLAN, SIZE, STEPS, furthest, gradients, loss, records, run_of, train, trained_by_torch

import clipless
from clipless.clipping import CLIPPINGS
from clipless.errors import BudgetSpent, InvalidArgument, InvalidType, Misuse, ReplayDiffers
from clipless.integrations.jax import make_private, noised
from clipless.integrations.jax.private import _total
from clipless.integrations.jax.sums import BLOCK
from clipless.noise import noise_source

SCHEDULE = clipless.schedule([(0.4, "abadi"), (0.6, clipless.dc_p(groups="flat"))])
CASES: dict[str, Any] = {
    **{name: name for name in CLIPPINGS},
    "per-layer": clipless.dc_e(groups="per-layer", rule="auto-s"),
    "equal-budget": clipless.quantile(groups="per-parameter", allocation="equal-budget"),
    "schedule": SCHEDULE,
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_the_torch_run(case: str) -> None:
    run, *start = run_of(clipping=CASES[case])
    params, state = train(run, *start)
    others, private = trained_by_torch(clipping=CASES[case])
    assert furthest(params, others) < 1e-5
    assert run.ledger == private.ledger
    assert run.ledger.steps == STEPS
    assert run.spent() == private.spent()
    assert run.plan == private.plan
    torch.testing.assert_close(run.thresholds, private.thresholds, rtol=1e-6, atol=0)
    assert run.history.names() == private.history.names()
    assert int(state[0].steps) == STEPS


def released(run: Any) -> Any:
    """What the first step releases, flat, with its noise taken off and times the expected batch."""
    transformation = run.transformation()
    x, y = next(iter(run.loader))
    params = run_of()[3]
    update, _ = transformation.update(gradients(params, x, y), transformation.init(params))
    sums = [np.asarray(leaf, np.float64) * run.plan.expected_batch for leaf in jax.tree_util.tree_leaves(update)]
    stddevs = [run.plan.noise_multiplier] * len(sums)
    zeros = [jnp.zeros(leaf.shape) for leaf in sums]
    noise = noised(noise_source(seed=5), "gradient", 0, zeros, stddevs)
    return np.concatenate([(a - np.asarray(b)).ravel() for a, b in zip(sums, noise, strict=True)])


@pytest.mark.parametrize("name", ["auto-s", "abadi", "global"])
def test_one_record_moves_the_release_by_at_most_the_sensitivity(name: str) -> None:
    """Through the loader, at rate 1: everyone is in the batch. The grid of the noise moves a number by 1/64 at most."""
    x, y = (column.numpy() for column in records(9))
    x = np.concatenate([x, 1e3 * x[:1]])
    y = np.concatenate([y, 1 - y[:1]])
    options = {"clipping": name, "batch_size": len(x), "noise_multiplier": 1.0}
    everyone = released(run_of((x, y), **options)[0])
    without = released(run_of((x[:-1], y[:-1]), **{**options, "batch_size": len(x) - 1})[0])
    moved = np.linalg.norm(everyone - without)
    assert moved <= 1 + len(everyone) ** 0.5 / 64
    if name != "global":
        assert moved > 0.8, "the record counts"


def test_a_record_whose_data_are_not_finite_adds_nothing_to_any_group() -> None:
    x, y = (column.numpy().copy() for column in records(10))
    options = {"clipping": clipless.abadi(groups="per-parameter"), "batch_size": 10}
    x[3, 0] = math.inf  # through tanh it is finite again: the gradients of the last layer are
    spoilt = released(run_of((x, y), **options)[0])
    others = np.arange(10) != 3
    x[3] = 0.0
    clean = released(run_of((x, y), **options)[0])
    without = released(run_of((x[others], y[others]), **{**options, "batch_size": 9})[0])
    np.testing.assert_allclose(spoilt, without, atol=1 / 32 + 1e-5)
    assert np.abs(spoilt - clean).max() > 1 / 16


def test_an_empty_batch_is_a_step() -> None:
    run, optimizer, state, params = run_of(batch_size=1, steps=20, clipping="dc-e", allow_overspend=True)
    seen = []
    for x, y in run.loader:
        seen.append(run._batch.records)  # type: ignore[union-attr]
        assert len(x) == len(y) == 8
        updates, state = optimizer.update(gradients(params, x, y), state, params)
        assert all(np.abs(leaf).max() > 0 for leaf in jax.tree_util.tree_leaves(updates))
        if len(seen) > 5 and 0 in seen:
            break
    assert 0 in seen
    assert run.ledger.steps == len(seen)
    assert run.ledger.events[0][0].statistic_multipliers  # type: ignore[union-attr]


def test_parts_of_a_batch_add_up_to_the_batch() -> None:
    run, *start = run_of(clipping="quantile")
    whole, _ = train(run, *start)
    run, optimizer, state, params = run_of(clipping="quantile")
    sizes = set()
    for parts in run.loader.microbatches(4):
        for batch in parts:
            sizes.add(len(batch[0]))
            run.add(gradients(params, *batch))
        updates, state = optimizer.update(None, state, params)
        params = optax.apply_updates(params, updates)
    assert sizes == {4}
    assert furthest(params, [torch.from_numpy(np.array(leaf)) for leaf in jax.tree_util.tree_leaves(whole)]) < 1e-6


def test_batches_have_few_shapes_and_no_record_is_left_out() -> None:
    data = (np.arange(1000, dtype=np.float32)[:, None],)
    run = make_private({"w": jnp.zeros(1)}, data, **{**PLAN, "steps": 40, "batch_size": 50}, seed=1)
    transformation, shapes = run.transformation(), set()
    state = transformation.init({"w": jnp.zeros(1)})
    for (x,) in run.loader:
        shapes.add(len(x))
        count = run._batch.records  # type: ignore[union-attr]
        assert (np.diff(x[:count, 0]) > 0).all()
        assert not x[count:].any()
        _, state = transformation.update({"w": jnp.asarray(x)}, state)
    assert shapes == {80}


def test_a_larger_batch_than_usual_is_whole() -> None:
    """Padding is to a multiple of the usual rows, so a batch that needs more gets more."""
    run = make_private({"w": jnp.zeros(1)}, np.ones((40, 1), np.float32), **PLAN | {"batch_size": 40}, seed=1)
    run._fetch.rows = 16
    whole = run._fetch.once(torch.arange(40))
    assert whole.shape == (48, 1)
    assert whole.sum() == 40


def test_many_records_are_added_in_float64() -> None:
    """A float32 sum of 80,000 equal records, one after the other, is off by many of them."""
    size = 40 * BLOCK + 1
    options = {"batch_size": size, "clipping": "abadi", "delta": 1e-7}
    run = make_private({"w": jnp.zeros(1)}, np.zeros((size, 1), np.float32), **PLAN | options, seed=1)
    batch = next(iter(run.loader))
    run.add({"w": jnp.full((len(batch), 1), 0.1)})
    total = float(_total(tuple(blocks[0] for blocks in run._blocks)))
    assert abs(total - size * float(np.float32(0.1))) < 0.02


def test_a_secret_number_of_records_is_nowhere_in_the_run() -> None:
    """Losses without a gradient: what is released is the noise. Nor does the padding tell how many records there are."""
    seen = []
    for size in (SIZE, SIZE - 1, 9):
        data = tuple(np.asarray(column) for column in records(size))
        run, optimizer, state, params = run_of(data, neighbours="add-remove", sample_rate=0.2)
        rows, updates = [], []
        for x, _ in run.loader:
            rows.append(len(x))
            nothing = jax.tree_util.tree_map(lambda leaf, x=x: jnp.zeros((len(x), *leaf.shape)), params)
            update, state = optimizer.update(nothing, state, params)
            updates.append([leaf.tolist() for leaf in jax.tree_util.tree_leaves(update)])
        public = run.plan.to_dict(), str(run.plan), len(run.loader), run.loader.batch_size, run.epochs, run.spent()
        seen.append((public, rows, updates))
    assert seen[0] == seen[1] == seen[2]
    assert (run.plan.dataset_size, run.plan.sample_rate) == (None, 0.2)
    with pytest.raises(InvalidArgument, match="leave sample_rate= out"):
        run_of(sample_rate=0.2)


def test_nothing_is_shown_if_the_event_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, optimizer, state, params = run_of()
    run.save_to(tmp_path / "ledger.jsonl")
    assert run._journal is not None
    run._journal.close()
    x, y = next(iter(run.loader))
    with pytest.raises(Misuse, match="is closed after a failed write"):
        optimizer.update(gradients(params, x, y), state, params)
    assert run.ledger.steps == 0
    assert not run._blocks
    with pytest.raises(Misuse, match="without a batch"):
        optimizer.update(gradients(params, x, y), state, params)


def test_the_event_is_recorded_before_the_release_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, state, params = run_of()
    recorded = []
    monkeypatch.setattr(
        "clipless.integrations.jax.private.to_jax", lambda part, dtype: recorded.append(run.ledger.steps)
    )
    x, y = next(iter(run.loader))
    run.transformation().update(gradients(params, x, y), state[0], params)
    assert recorded == [1] * 4


# Refusals.


def test_update_inside_jit_is_refused() -> None:
    run, optimizer, state, params = run_of()
    x, y = next(iter(run.loader))
    rows = gradients(params, x, y)
    with pytest.raises(Misuse, match="update\\(\\) is inside jit"):
        jax.jit(optimizer.update)(rows, state, params)
    with pytest.raises(Misuse, match="update\\(\\) is inside jit"):
        jax.jit(lambda rows: optimizer.update(rows, state, params))(rows)
    assert run.ledger.steps == 0
    several = optax.MultiSteps(run.transformation(), 2)
    with pytest.raises(Misuse, match="use loader.microbatches"):
        several.update(jax.tree_util.tree_map(lambda leaf: leaf[0], rows), several.init(params), params)
    optimizer.update(rows, state, params)
    assert run.ledger.steps == 1


def test_gradients_that_are_not_of_the_open_batch_are_refused() -> None:
    run, optimizer, state, params = run_of()
    with pytest.raises(Misuse, match="take one from loader"):
        optimizer.update(gradients(params, *(c.numpy() for c in records(8))), state, params)
    x, y = next(iter(run.loader))
    rows = gradients(params, x, y)
    with pytest.raises(Misuse, match="before all records of the batch were added"):
        optimizer.update(None, state, params)
    with pytest.raises(Misuse, match="another number of rows than the batch"):
        optimizer.update(jax.tree_util.tree_map(lambda leaf: leaf[:5], rows), state, params)
    with pytest.raises(InvalidArgument, match="does not have one row per record"):
        optimizer.update(jax.tree_util.tree_map(lambda leaf: leaf.sum(0), rows), state, params)
    with pytest.raises(InvalidType, match="another structure than the parameters"):
        optimizer.update(rows[:1], state, params)
    run.add(rows)
    with pytest.raises(Misuse, match="give its gradients once"):
        run.add(rows)
    _, state = optimizer.update(None, state, params)
    with pytest.raises(Misuse, match="take one from loader"):
        optimizer.update(rows, state, params)
    parts = next(iter(run.loader.microbatches(2)))
    run.add(gradients(params, *next(parts)))  # the first part of several
    with pytest.raises(Misuse, match="before all records of the batch were added"):
        optimizer.update(None, state, params)
    assert run.ledger.steps == 1


def test_a_batch_that_is_dropped_is_refused_and_can_be_had_again() -> None:
    run, optimizer, state, params = run_of()
    batches = iter(run.loader)
    x, _ = next(batches)
    with pytest.raises(Misuse, match="was not stepped"):
        next(batches)
    again, y = run.loader.again()
    np.testing.assert_array_equal(again, x)
    optimizer.update(gradients(params, again, y), state, params)
    with pytest.raises(Misuse, match="the middle of a batch"):
        next(iter(run.loader)) and run.state_dict()


def test_steps_beyond_the_budget_are_refused() -> None:
    run, *start = run_of()
    train(run, *start)
    with pytest.raises(BudgetSpent, match="all 3 planned steps are taken"):
        next(iter(run.loader))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (({"w": jnp.zeros(2)}, (np.zeros((5, 1)), np.zeros(4))), {}, InvalidArgument, "different numbers of rows"),
        (({"w": jnp.zeros(2)}, [1, 2]), {}, InvalidType, "pytree of arrays with a row per record"),
        (({"w": jnp.zeros(2)}, np.zeros((0, 1))), {}, InvalidArgument, "is empty"),
        (({"w": jnp.zeros(2, int)}, np.zeros((50, 1))), {}, InvalidType, "only arrays of real floating-point"),
        (({"w": 1.0}, np.zeros((50, 1))), {}, InvalidType, "'w' is float: only arrays"),
        (({"w": jnp.zeros(2)}, np.zeros((50, 1))), {"noise": "device"}, InvalidArgument, "made in main memory"),
        (({"w": jnp.zeros(2)}, np.zeros((50, 1))), {"l2_norm_clip": 1.0}, InvalidType, "What you mean is clipping="),
        (({"w": jnp.zeros(2)}, np.zeros((50, 1))), {"batch_size": 51}, InvalidArgument, "larger than the data set"),
    ],
)
def test_arguments_are_refused(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_private(*arguments, **{**PLAN, **options})


def test_several_processes_copies_and_other_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run, optimizer, *_ = run_of()
    with pytest.raises(Misuse, match="cannot be copied or pickled"):
        copy.deepcopy(run)
    with pytest.raises(InvalidArgument, match="other parameters"):
        optimizer.init({"w": jnp.zeros(1)})
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(Misuse, match="forked after make_private"):
        next(iter(run.loader))
    monkeypatch.undo()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(Misuse, match="JAX runs in 2 processes"):
        run_of()
    run.detach()
    with pytest.raises(Misuse, match="was detached"):
        next(iter(run.loader))


# Resuming.


@pytest.mark.parametrize("clipping", ["auto-s", "dc-e"])
def test_a_resumed_run_is_the_run(clipping: str, tmp_path: Path) -> None:
    run, *start = run_of(seed=None, clipping=clipping)
    run.save_to(tmp_path / "ledger.jsonl")
    params, state = train(run, *start, steps=1)
    torch.save(run.state_dict(), tmp_path / "run.pt")
    saved = params, state
    whole, _ = train(run, start[0], state, params, steps=1)
    run.detach()
    run, *start = run_of(seed=None, clipping=clipping)
    with pytest.raises(InvalidArgument, match="give ledger=, its path"):
        run.load_state_dict(torch.load(tmp_path / "run.pt"))
    run.load_state_dict(torch.load(tmp_path / "run.pt"), ledger=tmp_path / "ledger.jsonl")
    assert run.steps_taken == 1
    assert run.ledger.steps == 2
    optimizer = optax.chain(run.transformation(), optax.sgd(0.5))
    again, state = train(run, optimizer, saved[1], saved[0], steps=1)
    jax.tree_util.tree_map(np.testing.assert_array_equal, again, whole)
    train(run, optimizer, state, again, steps=1)
    assert run.ledger.steps == clipless.read_ledger(tmp_path / "ledger.jsonl").recorded().steps == 3


def test_a_repeated_step_must_release_what_it_released_before(tmp_path: Path) -> None:
    run, *start = run_of(seed=None)
    run.save_to(tmp_path / "ledger.jsonl")
    state = run.state_dict()
    train(run, *start, steps=1)
    run.detach()
    run, optimizer, own, params = run_of(seed=None)
    run.load_state_dict(state, ledger=tmp_path / "ledger.jsonl")
    x, y = next(iter(run.loader))
    other = jax.tree_util.tree_map(lambda leaf: -leaf, gradients(params, x, y))
    with pytest.raises(ReplayDiffers):
        optimizer.update(other, own, params)


def test_an_optimizer_that_is_ahead_of_the_ledger_is_refused() -> None:
    run, *start = run_of()
    params, state = train(run, *start, steps=2)
    fresh, optimizer, *_ = run_of()
    x, y = next(iter(fresh.loader))
    with pytest.raises(Misuse, match="optimizer's state is of step 2, and the ledger has 0"):
        optimizer.update(gradients(params, x, y), state, params)


# Imports.


def in_fresh_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_jax_is_imported_only_when_used_and_named_if_it_is_missing() -> None:
    code = (
        "import sys, clipless; clipless.make_private; clipless.integrations\n"
        "print(sorted({'jax', 'optax'} & sys.modules.keys()))\n"
        "sys.modules['optax'] = None\n"
        "try: import clipless.integrations.jax\n"
        "except ImportError as error: print(error)"
    )
    first, second = in_fresh_process(code).splitlines()
    assert first == "[]"
    assert second == "optax is missing, and clipless.integrations.jax needs it: pip install 'clipless[jax]'."


def test_the_problem_is_the_same_in_both() -> None:
    assert SIZE > BATCH
    assert jax.eval_shape(loss, run_of()[3], jnp.zeros(5), jnp.zeros((), int)).shape == ()
