"""A clipping that changes within a run: what is promised, that every phase is bounded, and that it resumes bit for bit.

The releases of schedules are computed by hand in tests/thresholds/test_releases.py.
"""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from clipless.accounting import joint_multiplier
from clipless.clipping import CLIPPINGS, RULES, ByGroup, Global
from clipless.errors import InvalidArgument, InvalidType
from clipless.phases import Schedule
from clipless.plan import RESERVE
from commanding import run_main
from small_run import BATCH, SIZE, STEPS, begin

LAST_GLOBAL = [(0.75, "abadi"), (0.25, clipless.global_(cutoff=4.0, threshold=2.0))]
OF_POLICIES = [(0.5, "dc-e"), (0.25, clipless.quantile(rule="auto-v")), (0.25, clipless.decay(noise_rho=0.5))]
SCHEDULES = {
    "rules": LAST_GLOBAL,
    "policies": OF_POLICIES,
    "one policy": [(0.5, "dc-e"), (0.5, clipless.dc_e(rule="auto-s"))],
    "single": [(1.0, "auto-s")],
}


@pytest.mark.parametrize("phases", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_resumes_bit_for_bit(tmp_path: Path, phases: Any) -> None:
    how = clipless.schedule(phases)
    whole = begin(clipping=how).go().close()
    for stop in (3, 6, 8):
        run = begin(clipping=how)
        run.private.save_to(tmp_path / f"ledger{stop}.jsonl")
        run.go(stop).save(tmp_path / "run.pt")
        run.go(4).close()
        resumed = begin(seed=99, clipping=how).load(tmp_path / "run.pt")
        assert resumed.private.steps_taken == stop
        resumed.go(2).save(tmp_path / "again.pt")  # in the middle of what is repeated
        resumed.close()
        resumed = begin(seed=98, clipping=how).load(tmp_path / "again.pt").go().close()
        assert torch.equal(resumed.weights(), whole.weights())
        assert torch.equal(resumed.private.thresholds, whole.private.thresholds)
        assert resumed.private.ledger == whole.private.ledger
        assert repr(resumed.private.history.to_dict()) == repr(whole.private.history.to_dict())  # with NaN


def test_a_run_that_goes_on_with_new_noise_is_in_the_phase_of_the_steps_that_are_counted(tmp_path: Path) -> None:
    how = clipless.schedule(LAST_GLOBAL)
    run = begin(clipping=how)
    run.private.save_to(tmp_path / "ledger.jsonl")
    run.go(7).save(tmp_path / "run.pt")
    run.go(3).close()
    resumed = begin(clipping=how).load(tmp_path / "run.pt", reseed=True)
    assert resumed.private.steps_taken == 10
    assert resumed.private.thresholds.tolist() == [[2.0]]
    assert resumed.go().private.ledger.steps == STEPS
    resumed.close()


@pytest.mark.parametrize("phases", SCHEDULES.values(), ids=SCHEDULES)
def test_the_ledger_is_what_was_planned_and_every_step_has_its_own_event(phases: Any) -> None:
    run = begin(clipping=clipless.schedule(phases))
    plan = run.private.plan
    events = [plan.event(step) for step in range(STEPS)]
    run.go().close()
    assert run.private.ledger == plan.planned()
    assert [event for event, count in run.private.ledger.events for _ in range(count)] == events
    assert run.private.spent().epsilon <= plan.epsilon * (1 + 1e-12)


def test_a_rule_that_changes_costs_nothing() -> None:
    plan = begin(clipping=clipless.schedule(LAST_GLOBAL)).private.plan
    assert plan.epsilon == clipless.epsilon(1.0, BATCH / SIZE, STEPS, 1e-5, "rdp")
    assert len(plan.planned().events) == 1


def test_a_statistic_is_paid_for_in_the_phase_that_releases_it() -> None:
    plan = begin(clipping=clipless.schedule(OF_POLICIES)).private.plan
    first, second, third = plan.phases
    assert (first.end, second.end, third.end) == (6, 9, 12)
    assert plan.event(5).statistic_multipliers == (5.0,)
    assert plan.event(6).statistic_multipliers == (second.statistic_multiplier,)
    assert [plan.event(step).statistic_multipliers for step in (9, 11)] == [(), ()]
    for step in range(9):
        event = plan.event(step)
        assert joint_multiplier(event.gradient_multiplier, *event.statistic_multipliers) == pytest.approx(1.0)
    assert [plan.event(step).gradient_multiplier for step in (9, 10, 11)] == pytest.approx(
        [0.5 ** (t / 3) for t in range(3)]
    )
    by_hand = clipless.Ledger()
    for step in range(STEPS):
        by_hand.record(plan.event(step))
    assert plan.epsilon == pytest.approx(by_hand.spent(1e-5, "rdp").epsilon, rel=1e-9)


def test_every_phase_divides_its_noise_as_its_own_clipping_says() -> None:
    """Per layer, with unequal thresholds: the same budget, other standard deviations. Five of them of 20,000 numbers."""
    thresholds, groups = [3.0, 4.0], [["0.*"], ["1.*"]]
    uniform, equal = (clipless.abadi(thresholds, groups=groups, allocation=how) for how in ("uniform", "equal-budget"))
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data, settings = TensorDataset(torch.zeros(8, 100)), {"delta": 1e-5, "accountant": "rdp", "seed": 3}
    how = clipless.schedule([(0.5, uniform), (0.5, equal)])
    private = clipless.make_private(
        model, optimizer, data, noise_multiplier=2.0, batch_size=4, steps=2, clipping=how, **settings
    )
    found = []
    for (x,) in private.loader:
        private.backward(model(x).sum(1))
        optimizer.step()
        found.append([4 * float(p.grad.double().std()) for p in model.parameters() if p.grad is not None])
    assert found[0] == pytest.approx([2 * 5.0, 2 * 5.0], rel=5 / math.sqrt(20_000))
    assert found[1] == pytest.approx([2 * math.sqrt(2) * one for one in thresholds], rel=5 / math.sqrt(20_000))


def test_calibration_keeps_the_whole_schedule_within_the_budget() -> None:
    how = clipless.schedule(OF_POLICIES)
    run = begin(clipping=how, noise_multiplier=None, epsilon=3.0, accountant="pld")
    spent = run.private.plan.planned().spent(1e-5).epsilon
    assert 2.9 < spent <= 3.0


@pytest.mark.parametrize("phases", SCHEDULES.values(), ids=SCHEDULES)
def test_the_plan_prints_every_phase(phases: Any) -> None:
    plan = begin(clipping=clipless.schedule(phases)).private.plan
    text = str(plan)
    for phase in plan.phases:
        assert phase.clipping.name in text
    if len(plan.phases) > 1:
        assert all(f"steps {phase.first + 1}-{phase.end}" in text for phase in plan.phases)
        assert [row["name"] for row in plan.to_dict()["clipping"]["phases"]] == [p.clipping.name for p in plan.phases]


def test_equal_policies_in_a_row_share_their_thresholds() -> None:
    one = begin(clipping="decay").go().close()
    two = begin(clipping=clipless.schedule([(0.5, "decay"), (0.5, "decay")])).go().close()
    assert torch.equal(one.weights(), two.weights())
    assert one.private.ledger == two.private.ledger


def test_steps_beyond_the_plan_are_clipped_as_the_last() -> None:
    run = begin(clipping=clipless.schedule(LAST_GLOBAL), allow_overspend=True)
    for _, (x, y) in zip(range(STEPS + 3), passes(run), strict=False):
        run.step(x, y)
    assert run.private.plan.phase(STEPS + 2).clipping.name == "global"
    assert run.private.thresholds.tolist() == [[2.0]]


def passes(run: Any) -> Any:
    while True:
        yield from run.private.loader


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("after", CLIPPINGS)
def test_removing_a_record_is_bounded_in_every_phase(rule: str, after: str) -> None:
    """One run with all records in every batch and one without the first, under the same noise: at every step the sums
    differ by no more than the sensitivity at the thresholds of that step, which are those of the other run."""
    first = clipless.quantile(rule=rule, count_stddev=1e6)
    how = clipless.schedule([(0.5, first), (0.5, CLIPPINGS[after]())])
    torch.manual_seed(0)
    x, y = torch.randn(20, 5) * torch.logspace(-2, 2, 20).unsqueeze(1), torch.randint(3, (20,))
    runs = [full_batch(how, x, y), full_batch(how, x[1:], y[1:])]
    (plan, model, private, optimizer), (_, other, shadow, shadow_optimizer) = runs
    moved = 0.0
    for step in range(4):
        bound = plan.sensitivity(private.thresholds)
        stddev = float(plan.stddevs(step, private.thresholds)[0, 0])
        assert stddev == pytest.approx(bound * plan.event(step).gradient_multiplier * (1 + RESERVE))
        other.load_state_dict(model.state_dict())
        shadow._set_policy({k: v.clone() for k, v in private._policy_state.items()})
        sums = [one_step(*run) for run in ((model, private, optimizer), (other, shadow, shadow_optimizer))]
        # Both have the same noise, and each is rounded to the grid of the noise.
        change = float((sums[0] - sums[1]).norm())
        assert change <= bound + math.sqrt(len(sums[0])) * stddev / 64
        moved = max(moved, change / bound)
    assert moved > 0.1
    for _, _, private, _ in runs:
        private.detach()


def full_batch(how: Schedule, x: Tensor, y: Tensor) -> tuple[Any, nn.Module, clipless.Private, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private = clipless.make_private(
            model, optimizer, TensorDataset(x, y), batch_size=len(x), steps=4, clipping=how, seed=3, delta=1e-5,
            noise_multiplier=0.5, accountant="rdp",
        )  # fmt: skip
    return private.plan, model, private, optimizer


def one_step(model: nn.Module, private: clipless.Private, optimizer: torch.optim.Optimizer) -> Tensor:
    """The released sum, not divided by the expected batch."""
    for x, y in private.loader:
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        break
    grad = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()
    return grad * private.plan.expected_batch


def test_a_report_names_every_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begin(clipping=clipless.schedule(LAST_GLOBAL))
    run.private.save_to(tmp_path / "ledger.jsonl")
    run.go().close()
    shown = run_main(["report", "ledger.jsonl"], tmp_path, capsys)
    assert shown.returncode == 0, shown.stderr
    words = " ".join(shown.stdout.split())
    assert "abadi, Constant(threshold=1.0) for 9 steps; global, Constant(threshold=2.0) for 3 steps" in words


REFUSED: dict[str, tuple[Any, str]] = {
    "shares": ([(0.5, "abadi"), (0.4, "global")], "add up to 0.9"),
    "negative": ([(1.5, "abadi"), (-0.5, "global")], "positive"),
    "groups": ([(0.5, "abadi"), (0.5, clipless.auto_s(groups="per-layer"))], "different groups"),
    "name": ([(1.0, "abada")], "did you mean 'abadi'"),
    "nested": ([(1.0, clipless.schedule([(1.0, "abadi")]))], "schedule within a schedule"),
    "empty": ([], "pairs"),
    "text": ("abadi", "pairs"),
    "no pair": (["abadi"], "pair"),
    "percent": ([(95, "abadi"), (5, "global")], "add up to 1"),
    "swapped": ([("abadi", 1.0)], "share of a phase"),
}


@pytest.mark.parametrize(("phases", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_go_together_is_refused(phases: Any, message: str) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match=message):
        clipless.schedule(phases)


def test_a_phase_without_a_step_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="phase 2 of the schedule, global for 0.01 of 12 steps"):
        begin(clipping=clipless.schedule([(0.99, "abadi"), (0.01, "global")]))


def test_a_statistic_that_takes_too_much_is_refused_in_a_later_phase_too() -> None:
    with pytest.raises(InvalidArgument, match="raise it above"):
        begin(clipping=clipless.schedule([(0.5, "abadi"), (0.5, clipless.dc_e(histogram_multiplier=0.9))]))


def test_one_pure_call_takes_one_phase() -> None:
    with pytest.raises(InvalidType, match="one phase"):
        clipless.clipped_sum(nn.Linear(2, 1), lambda m, x: m(x)[:, 0], torch.ones(2, 2), clipless.schedule(LAST_GLOBAL))  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"cutoff": [1.0, 2.0, 3.0]}, {"cutoff": [1.0, 2.0, 3.0], "threshold": 1.0}])
def test_a_cutoff_for_each_group_needs_as_many_groups(given: Any) -> None:
    with pytest.raises(InvalidArgument, match="3 cutoffs for 2 groups"):
        begin(clipping=clipless.global_(**given, groups="per-layer"))
    with pytest.raises(InvalidArgument, match="3 cutoffs for 2 groups"):
        begin(clipping=clipless.quantile(rule=clipless.global_(**given), groups="per-layer"))
    with pytest.raises(InvalidArgument, match="3 cutoffs for 1 groups"):
        clipless.clipped_sum(nn.Linear(2, 1), lambda m, x: m(x)[:, 0], torch.ones(2, 2), clipless.global_(**given))
    with pytest.raises(InvalidArgument, match="2 cutoffs and 3 thresholds"):
        clipless.global_(cutoff=[1.0, 2.0], threshold=[1.0, 2.0, 3.0])


def test_factors_of_some_groups_are_those_of_their_own_rules() -> None:
    how = clipless.global_(cutoff=[1.0, 4.0, 9.0], threshold=[1.0, 2.0, 3.0], groups="per-layer")
    norms, thresholds = torch.tensor([[3.0], [3.0], [3.0]]), how.start(3)
    assert how.factors(norms, thresholds, range(3)).flatten().tolist() == pytest.approx([0.0, 1 / 2, 1 / 3])
    for groups in ([2], [1, 0], [2, 1]):
        found = how.factors(norms[groups], thresholds[groups], groups).flatten().tolist()
        assert found == pytest.approx([[0.0, 1 / 2, 1 / 3][g] for g in groups])


def test_a_single_number_is_shared_out_over_the_groups() -> None:
    both = clipless.global_(cutoff=4.0, threshold=[1.0, 2.0], groups="per-layer")
    ratios = (
        [rule.ratio for rule in both.rule.rules if isinstance(rule, Global)] if isinstance(both.rule, ByGroup) else []
    )
    assert ratios == pytest.approx([4 / math.sqrt(2), 4 / math.sqrt(2) / 2])
    bound = clipless.global_(cutoff=[4.0, 1.0], threshold=2.0, groups="per-layer").start(2)
    assert bound.flatten().tolist() == pytest.approx([math.sqrt(2)] * 2)


def test_each_group_is_cut_at_its_own_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(40, 3), torch.randint(2, (40,))

    def losses(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch[0]), batch[1], reduction="none")

    how = clipless.global_(cutoff=[0.4, 0.9], threshold=[0.2, 3.0], groups="per-layer")
    ours = clipless.clipped_sum(model, losses, (x, y), how)
    truth = clipless.oracle.clipped_sum(model, losses, (x, y), how)
    for name, grad in ours.grads.items():
        torch.testing.assert_close(grad, truth.grads[name], rtol=1e-4, atol=1e-6)
    kept = torch.stack([truth.norms[0] <= 0.4, truth.norms[1] <= 0.9])
    assert 0 < int(kept[0].sum()) < 40
    assert 0 < int(kept[1].sum()) < 40
    report = clipless.check(model, losses, (x, y), how)
    assert report.sound, report.problems


def test_clipless_check_looks_at_every_phase() -> None:
    x, y = torch.randn(60, 5), torch.randint(2, (60,))

    def losses(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch[0]), batch[1], reduction="none")

    run = begin(clipping=clipless.schedule(LAST_GLOBAL), check=(losses, (x[:6], y[:6])))
    run.close()
    with pytest.raises(clipless.Unsound):
        begin(
            clipping=clipless.schedule(LAST_GLOBAL),
            check=(lambda m, b: losses(m, b) * losses(m, b).mean(), (x[:6], y[:6])),
        )
