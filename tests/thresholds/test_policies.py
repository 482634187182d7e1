"""Each policy against hand-computed values, an independent reference, and inputs at which nothing may go wrong."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import clipless
from clipless.clipping import CLIPPINGS
from clipless.thresholds import DCE, DCP, Decay, Quantile, Setting, State, ThresholdPolicy
from thresholds import reference

SETTING = Setting(groups=1, expected_batch=100, steps=50, gradient_multiplier=1.5, noise_dimensions=(1000,))
LEARNING: dict[str, ThresholdPolicy] = {"dc-p": DCP(), "dc-e": DCE(), "quantile": Quantile()}
POLICIES = {name: make().policy for name, make in CLIPPINGS.items()}


def step(policy: ThresholdPolicy, state: State, norms: Tensor, noise: Tensor | None, setting: Setting) -> State:
    """One step with the noise of the test's choice, given in the units of the statistic."""
    observed = policy.observe(state, norms)
    released = None if observed is None else observed + (torch.zeros_like(observed) if noise is None else noise)
    return policy.update(state, released, setting)


def noise_for(
    policy: ThresholdPolicy, generator: torch.Generator, setting: Setting, scale: float = 1.0
) -> Tensor | None:
    shape = policy.observe(policy.init(setting), torch.zeros(setting.groups, 0))
    if shape is None:
        return None
    multiplier = policy.statistic_multiplier(1.0, setting)
    assert multiplier is not None
    return scale * multiplier * torch.randn(shape.shape, generator=generator, dtype=torch.float64)


def test_quantile_by_hand() -> None:
    """4 norms, 3 of them at most 1, batch 10: Σ(b−½) = 1, b̃ = 0.6 + noise 2/10."""
    policy, setting = Quantile(percentile=0.5, rate=0.2), Setting(groups=1, expected_batch=10)
    state = policy.init(setting)
    norms = torch.tensor([[0.5, 0.9, 1.0, 3.0]])
    assert float(policy.observe(state, norms)) == pytest.approx(2.0)
    after = step(policy, state, norms, torch.tensor([[4.0]]), setting)
    assert float(after["thresholds"]) == pytest.approx(math.exp(-0.2 * (0.5 + (1 + 2) / 10 - 0.5)))


def test_dc_p_by_hand() -> None:
    """Bins of 0.25 on [0, 1]: counts 1, 0, 2, 2; half of 5 is reached in the third; middle 0.625, range 1.25."""
    policy = DCP(bins=4)
    state = policy.init(SETTING)
    norms = torch.tensor([[0.1, 0.5, 0.74, 0.9, 7.0]])
    assert policy.observe(state, norms).tolist() == [[1, 0, 2, 2]]
    after = step(policy, state, norms, None, SETTING)
    assert float(after["thresholds"]) == pytest.approx(0.625)
    assert float(after["range"]) == pytest.approx(1.25)


def test_dc_e_by_hand() -> None:
    """All norms in the bin around 3.5 of 10 on [0, 10]: E(C) = C²·0.25 + (3.5 − C)², least at 2.8; next to it 3."""
    policy = DCE(bins=10, start=1.0)
    setting = Setting(groups=1, expected_batch=100, gradient_multiplier=2.0, noise_dimensions=(625,))
    state = {"thresholds": torch.full((1, 1), 10.0), "range": torch.full((1, 1), 10.0, dtype=torch.float64)}
    after = step(policy, state, torch.full((1, 5), 3.3), None, setting)
    assert float(after["thresholds"]) == pytest.approx(3.0)
    assert float(after["range"]) == 5.0


def test_decay_by_hand() -> None:
    policy, setting = Decay(start=2.0, rho=0.25, noise_rho=0.5), Setting(groups=1, steps=4)
    state = policy.init(setting)
    seen = []
    for _ in range(5):
        seen.append(float(policy.thresholds(state)))
        state = policy.update(state, None, setting)
    assert seen == pytest.approx([2.0, 2 * 0.25**0.25, 1.0, 2 * 0.25**0.75, 0.5])
    assert [relative for relative, _ in policy.noise_schedule(4)] == pytest.approx([0.5 ** (t / 4) for t in range(4)])


@pytest.mark.parametrize("steps", [1, 2, 31, 32, 33, 100, 999])
def test_the_noise_schedule_covers_every_step_and_follows_its_formula(steps: int) -> None:
    stairs = Decay(noise_rho=0.3).noise_schedule(steps)
    assert sum(count for _, count in stairs) == steps
    relative = [value for value, count in stairs for _ in range(count)]
    exact = [0.3 ** (t / steps) for t in range(steps)]
    width = 0.3 ** -(1 / 64)
    assert all(e / width <= r <= e * width for r, e in zip(relative, exact, strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LEARNING)
def test_trajectories_agree_with_the_reference(name: str, seed: int) -> None:
    policy, setting = LEARNING[name], SETTING
    generator = torch.Generator().manual_seed(seed)
    state = policy.init(setting)
    threshold, width = 1.0, {"dc-p": 1.0, "dc-e": 20.0, "quantile": 0.0}[name]
    for t in range(200):
        records = int(torch.randint(0, 200, (), generator=generator))
        norms = torch.randn(1, records, generator=generator).abs() * (5 if t < 100 else 0.1)
        noise = noise_for(policy, generator, setting)
        state = step(policy, state, norms, noise, setting)
        if name == "quantile":
            inside = sum(0.5 if norm <= torch.tensor(threshold) else -0.5 for norm in norms[0])
            threshold = reference.quantile_step(threshold, inside + float(noise) / 2, 100, 0.5, 0.2)
        else:
            counts = reference.histogram(norms[0].tolist(), 20, width)
            noised = [count + float(n) for count, n in zip(counts, noise[0], strict=True)]
            if name == "dc-p":
                threshold, width = reference.dc_p_step(threshold, width, noised, 0.5)
            else:
                threshold, width = reference.dc_e_step(threshold, width, noised, 1.5, 1000, 100)
            assert float(state["range"]) == pytest.approx(width, rel=1e-5)
        assert float(policy.thresholds(state)) == pytest.approx(threshold, rel=1e-4)


STATED_STEPS = {"dc-p": 12, "dc-e": 20, "quantile": 80}


@pytest.mark.parametrize("off", [0.01, 100.0])
@pytest.mark.parametrize("name", LEARNING)
def test_a_bad_start_is_left_behind(name: str, off: float) -> None:
    """Started 100 times too low or too high, the threshold is within a factor of 2 of where it settles."""
    setting = Setting(groups=1, expected_batch=256, gradient_multiplier=1.0, noise_dimensions=(1000,))
    generator = torch.Generator().manual_seed(4)
    norms = (torch.randn(1, 256, generator=generator) * 0.2 + 1).abs()

    def run(start: float, steps: int) -> float:
        policy = CLIPPINGS[name](start=start).policy
        state = policy.init(setting)
        for _ in range(steps):
            state = step(policy, state, norms, noise_for(policy, generator, setting), setting)
        return float(policy.thresholds(state))

    settled = run(1.0, 300)
    assert 0.2 < settled < 2
    assert settled / 2 <= run(off * settled, STATED_STEPS[name]) <= settled * 2
    assert not settled / 2 <= run(off * settled, 1) <= settled * 2


ODD = {
    "empty": torch.zeros(1, 0),
    "zero": torch.zeros(1, 50),
    "tiny": torch.full((1, 50), 1e-30),
    "huge": torch.full((1, 50), 1e30),
    "infinite": torch.full((1, 50), math.inf),
    "nan": torch.full((1, 50), math.nan),
    "mixed": torch.tensor([[0.0, 1e-30, 1.0, 1e30, math.inf]]),
}


@pytest.mark.parametrize("noisy", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("norms", ODD.values(), ids=ODD)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_nothing_diverges(policy: ThresholdPolicy, norms: Tensor, noisy: float) -> None:
    generator = torch.Generator().manual_seed(0)
    state = policy.init(SETTING)
    for _ in range(150):
        state = step(policy, state, norms, noise_for(policy, generator, SETTING, noisy), SETTING)
        for value in state.values():
            assert value.isfinite().all()
        assert (policy.thresholds(state) >= 1e-10 * (1 - 1e-6)).all()
        assert (policy.thresholds(state) <= 1e10 * (1 + 1e-6)).all()


@pytest.mark.parametrize(("start", "norm"), [(5e9, math.inf), (2e-10, 0.0)], ids=["upwards", "downwards"])
@pytest.mark.parametrize("policy", [*LEARNING.values(), Decay(rho=0.01)], ids=[*LEARNING, "decay"])
def test_thresholds_and_ranges_stop_at_their_limits(policy: ThresholdPolicy, start: float, norm: float) -> None:
    """From a start close to a limit, with all norms beyond it. A histogram reaches to twice its largest threshold."""
    policy = replace(policy, start=start)  # type: ignore[type-var]
    state = policy.init(SETTING)
    for _ in range(80):
        state = step(policy, state, torch.full((1, 50), norm), None, SETTING)
        assert 1e-10 * (1 - 1e-6) <= float(policy.thresholds(state)) <= 1e10 * (1 + 1e-6)
        assert 1e-10 * (1 - 1e-6) <= float(state.get("range", torch.ones(()))) <= 2e10 * (1 + 1e-6)


@pytest.mark.parametrize("name", ["dc-p", "dc-e"])
def test_a_histogram_without_signal_changes_nothing(name: str) -> None:
    policy = LEARNING[name]
    state = policy.init(SETTING)
    after = policy.update(state, torch.full((1, 20), -1.0, dtype=torch.float64), SETTING)
    assert all(torch.equal(state[key], after[key]) for key in state)


@pytest.mark.parametrize("policy", LEARNING.values(), ids=LEARNING)
@pytest.mark.parametrize("groups", [1, 4])
def test_one_record_moves_the_statistic_by_at_most_one(policy: ThresholdPolicy, groups: int) -> None:
    setting = Setting(groups=groups)
    state = policy.init(setting)
    for norm in (0.0, 0.3, 1.0, 1e30, math.inf, math.nan):
        empty = policy.observe(state, torch.zeros(groups, 0))
        one = policy.observe(state, torch.full((groups, 1), norm))
        assert float((one - empty).norm()) == pytest.approx(1.0)


@pytest.mark.parametrize("policy", LEARNING.values(), ids=LEARNING)
def test_the_statistic_adds_up_over_micro_batches(policy: ThresholdPolicy) -> None:
    state = policy.init(SETTING)
    norms = torch.rand(1, 30) * 3
    parts = sum(policy.observe(state, part) for part in norms.split(7, dim=1))
    torch.testing.assert_close(parts, policy.observe(state, norms))


@pytest.mark.parametrize("policy", LEARNING.values(), ids=LEARNING)
def test_groups_are_followed_one_by_one(policy: ThresholdPolicy) -> None:
    """Three groups of norms 1, 10 and 100: each threshold follows its own."""
    setting = Setting(groups=3, expected_batch=500, gradient_multiplier=1.0, noise_dimensions=(20_000,) * 3)
    state = policy.init(setting)
    generator = torch.Generator().manual_seed(1)
    norms = torch.rand(3, 500, generator=generator) + 0.5
    norms *= torch.tensor([[1.0], [10.0], [100.0]])
    for _ in range(150):
        state = step(policy, state, norms, noise_for(policy, generator, setting, 0.1), setting)
    found = policy.thresholds(state).flatten()
    assert 5 < float(found[1] / found[0]) < 20
    assert 5 < float(found[2] / found[1]) < 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: clipless.dc_p(percentile=1.0), "percentile must lie between 0 and 1"),
        (lambda: clipless.dc_p(bins=1), "bins must be at least 2"),
        (lambda: clipless.dc_e(bins=2.5), "bins must be a whole number"),
        (lambda: clipless.dc_e(start=-1), "start must be positive"),
        (lambda: clipless.dc_e(histogram_multiplier=0), "histogram_multiplier must be positive"),
        (lambda: clipless.quantile(percentile="half"), "percentile must be a number"),
        (lambda: clipless.quantile(rate=math.nan), "rate must be a number and is NaN"),
        (lambda: clipless.decay(rho=1.5), "rho must lie in"),
        (lambda: clipless.decay(noise_rho=0), "noise_rho must be positive"),
        (lambda: clipless.dc_e(rule="abbadi"), "did you mean 'abadi'"),
    ],
)
def test_bad_configurations_are_refused(make, message: str) -> None:
    with pytest.raises(clipless.CliplessError, match=message):
        make()
