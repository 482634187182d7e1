"""Policies inside a private run: what they cost, what they release, and that nothing is lost on the way."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from clipless.accounting import joint_multiplier
from clipless.clipping import CLIPPINGS, RULES, Clipping, as_rule
from clipless.plan import noise_stddevs
from clipless.sampling import loader
from clipless.thresholds import Constant
from noising import assert_on_grid, seeded_normals
from problems import PROBLEMS, losses

RELEASING = ["dc-p", "dc-e", "quantile"]
TAKING_A_RULE = [name for name, make in CLIPPINGS.items() if "rule" in inspect.signature(make).parameters]
SIGMA, RECORDS, BATCH, STEPS = 1.2, 120, 30, 10


class Run:
    """A small private run that can be built twice the same."""

    def __init__(self, clipping: str | Clipping, seed: int = 3, **budget: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        data = TensorDataset(torch.randn(RECORDS, 5) * 4, torch.randint(3, (RECORDS,)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.private = clipless.make_private(
            self.model,
            self.optimizer,
            data,
            batch_size=BATCH,
            steps=STEPS,
            clipping=clipping,
            seed=seed,
            delta=1e-5,
            **{"loss_reduction": "mean", **(budget or {"noise_multiplier": SIGMA})},
        )

    def go(self, steps: int | None = None, part: int | None = None) -> "Run":
        batches = self.private.loader.microbatches(part or RECORDS)
        for parts in batches:
            for x, y in parts:
                F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            if self.private.ledger.steps == steps:
                break
        return self

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@pytest.mark.parametrize("groups", ["flat", "per-layer"])
@pytest.mark.parametrize("name", RELEASING)
def test_the_ledger_includes_the_statistic(name: str, groups: str) -> None:
    """Ε from the ledger is that of the total noise, and more than the gradient's noise alone would cost."""
    run = Run(CLIPPINGS[name](groups=groups)).go()
    plan, spent = run.private.plan, run.private.spent()
    assert plan.gradient_multiplier > SIGMA
    assert joint_multiplier(plan.gradient_multiplier, plan.statistic_multiplier) == pytest.approx(SIGMA)
    rate = BATCH / RECORDS
    assert spent.epsilon == pytest.approx(clipless.epsilon(SIGMA, rate, STEPS, 1e-5), rel=1e-6)
    assert spent.epsilon > clipless.epsilon(plan.gradient_multiplier, rate, STEPS, 1e-5) * 1.001
    ((event, count),) = run.private.ledger.events
    assert count == STEPS
    assert event.statistic_multipliers == (plan.statistic_multiplier,)


@pytest.mark.parametrize("name", CLIPPINGS)
def test_calibration_from_epsilon_counts_everything(name: str) -> None:
    run = Run(CLIPPINGS[name](), epsilon=2.0).go()
    assert 1.95 < run.private.spent().epsilon <= 2.0


def test_a_noise_schedule_is_composed_step_by_step() -> None:
    run = Run(clipless.decay(rho=0.5, noise_rho=0.25), epsilon=2.0).go()
    assert 1.95 < run.private.spent().epsilon <= 2.0
    multipliers = [event.noise_multiplier for event, _ in run.private.ledger.events]
    first = run.private.plan.noise_multiplier
    assert multipliers == pytest.approx([first * 0.25 ** (t / STEPS) for t in range(STEPS)])
    assert float(run.private.thresholds) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("clipping", "message"),
    [
        (clipless.dc_e(histogram_multiplier=1.0), r"1\.2"),
        (clipless.dc_p(histogram_multiplier=1.2), r"1\.2"),
        (clipless.quantile(count_stddev=0.5), r"1\.2"),
    ],
)
def test_a_statistic_with_too_little_noise_is_refused(clipping: Clipping, message: str) -> None:
    with pytest.raises(clipless.InvalidArgument, match=message):
        Run(clipping)


@pytest.mark.parametrize(("sigma", "expected"), [(0.9, 5.0), (1.99, 5.0), (2.0, 8.0), (3.0, 8.0), (3.01, 12.0)])
def test_the_histogram_multiplier_follows_the_total(sigma: float, expected: float) -> None:
    for name in ("dc-p", "dc-e"):
        assert Run(name, noise_multiplier=sigma).private.plan.statistic_multiplier == expected


def test_quantile_uses_a_twentieth_of_the_expected_batch() -> None:
    run = Run(clipless.quantile(count_stddev=3.0))
    assert run.private.plan.statistic_multiplier == 6.0
    assert Run("quantile").private.plan.statistic_multiplier == pytest.approx(max(2 * BATCH / 20, 2 * SIGMA))


@pytest.mark.parametrize("groups", ["flat", "per-layer"])
@pytest.mark.parametrize("name", RELEASING)
def test_what_is_released_is_the_statistic_with_its_noise(name: str, groups: str) -> None:
    """The released values are those of the policy on the true norms, plus the source's noise times the multiplier."""
    run = Run(CLIPPINGS[name](groups=groups))
    policy, plan = run.private.plan.clipping.policy, run.private.plan
    state = policy.init(plan.setting)
    for step, (x, y) in enumerate(run.private.loader):
        norms = true_norms(run.model, x, y, len(plan.groups))
        truth = policy.observe(state, norms)
        (noise,) = seeded_normals(3, "statistic", step, [truth])
        F.cross_entropy(run.model(x), y).backward()
        run.optimizer.step()
        released = run.private.history["statistic"][step]
        assert_on_grid(released, truth + plan.statistic_multiplier * noise, plan.statistic_multiplier, 1e-4)
        state = policy.update(state, released, plan.setting)
        torch.testing.assert_close(run.private.thresholds, policy.thresholds(state))
    assert len(run.private.history) == STEPS
    assert run.private.history["thresholds"].shape == (STEPS, len(plan.groups), 1)


def true_norms(model: nn.Module, x: Tensor, y: Tensor, groups: int) -> Tensor:
    """Norms of each record's gradient by plain autograd on a copy, for all parameters or for each of the two layers."""
    rows = []
    for b in range(len(x)):
        copy = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        copy.load_state_dict(model.state_dict())
        loss = F.cross_entropy(copy(x[b : b + 1]), y[b : b + 1])
        grads = [g.flatten() for g in torch.autograd.grad(loss, list(copy.parameters()))]
        parts = [torch.cat(grads)] if groups == 1 else [torch.cat(grads[:2]), torch.cat(grads[2:])]
        rows.append(torch.stack([part.norm() for part in parts]))
    return torch.stack(rows, 1) if rows else torch.zeros(groups, 0)


@pytest.mark.parametrize("name", CLIPPINGS)
def test_micro_batches_change_nothing(name: str) -> None:
    whole, parts = Run(name).go(), Run(name).go(part=4)
    torch.testing.assert_close(parts.private.thresholds, whole.private.thresholds, rtol=1e-4, atol=0)
    torch.testing.assert_close(parts.weights(), whole.weights(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CLIPPINGS)
def test_thresholds_survive_a_resume(name: str) -> None:
    """Stopped in the middle and continued elsewhere, the run ends bit for bit as if never stopped."""
    uninterrupted = Run(name).go()
    first = Run(name).go(steps=4)
    second = Run(name, seed=99)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.private.load_state_dict(first.private.state_dict())
    assert torch.equal(second.private.thresholds, first.private.thresholds)
    second.go()
    assert torch.equal(second.weights(), uninterrupted.weights())
    assert torch.equal(second.private.thresholds, uninterrupted.private.thresholds)
    assert second.private.history.to_dict() == uninterrupted.private.history.to_dict()


@pytest.mark.parametrize("name", TAKING_A_RULE)
@pytest.mark.parametrize("rule", RULES)
def test_policies_go_with_every_rule(name: str, rule: str) -> None:
    run = Run(CLIPPINGS[name](rule=rule, groups="per-parameter")).go()
    assert run.private.plan.clipping.rule == as_rule(rule)
    assert run.weights().isfinite().all()
    assert run.private.ledger.steps == STEPS


def test_every_policy_that_adapts_takes_a_rule() -> None:
    assert {"decay", *RELEASING} <= set(TAKING_A_RULE)
    fixed = set(CLIPPINGS) - set(TAKING_A_RULE)
    assert all(isinstance(CLIPPINGS[name]().policy, Constant) for name in fixed)


@pytest.mark.parametrize("name", RELEASING)
def test_an_all_empty_run_is_a_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is ever sampled; the statistic is released all the same, and nothing becomes NaN."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))
    private = clipless.make_private(
        model,
        optimizer,
        data,
        noise_multiplier=1.0,
        delta=1e-5,
        batch_size=1,
        steps=12,
        clipping=name,
        seed=1,
        loss_reduction="mean",
    )
    monkeypatch.setattr(loader, "poisson_sample", lambda key, size, rate: torch.empty(0, dtype=torch.int64))
    empty = 0
    for x, y in private.loader:
        empty += len(x) == 0
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert empty == 12
    assert private.history["statistic"].isfinite().all()
    assert private.thresholds.isfinite().all()
    assert len(private.history) == 12
    private.detach()


@given(data=st.data())
def test_removing_one_record_moves_sum_and_statistic_together_by_at_most_one_over_sigma(data: st.DataObject) -> None:
    """The pair in its scaled norm: (Δsum / s)² + (Δstatistic / σ_H)² ≤ 1/σ², with s per group."""
    problem = PROBLEMS[data.draw(st.sampled_from(sorted(PROBLEMS)))]
    model = problem.model()
    name, groups = data.draw(st.sampled_from(RELEASING)), data.draw(st.sampled_from(["flat", "per-layer"]))
    sigma = data.draw(st.floats(0.3, 4.0))
    how = CLIPPINGS[name](start=data.draw(st.floats(1e-2, 1e2)), groups=groups)
    x, y = problem.batch(data.draw(st.integers(1, 4)), seed=data.draw(st.integers(0, 50)))
    if x.is_floating_point():
        x[0] *= data.draw(st.sampled_from([0.0, 1.0, 1e4]))
    whole, without = (clipless.clipped_sum(model, losses, b, how) for b in ((x, y), (x[1:], y[1:])))
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    members = clipless.partition.partition(groups, names).members
    setting = clipless.thresholds.Setting(groups=len(members), expected_batch=20)
    statistic = how.policy.statistic_multiplier(sigma, setting)
    gradient = clipless.accounting.gradient_multiplier(sigma, statistic)
    stddevs = noise_stddevs(how.start(len(members)), gradient, "uniform").flatten()
    state = how.policy.init(setting)
    moved = (how.policy.observe(state, whole.norms) - how.policy.observe(state, without.norms)).norm() / statistic
    square = float(moved) ** 2
    for group, stddev in zip(members, stddevs, strict=True):
        for parameter in group:
            change = (whole.grads[parameter].double() - without.grads[parameter].double()).norm() / stddev
            square += float(change) ** 2
    assert math.sqrt(square) <= 1 / sigma * (1 + 1e-4)
