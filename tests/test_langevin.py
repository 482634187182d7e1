"""DP-SGLD: the law of its samples on a conjugate problem, its noise by hand, its budget, and what it refuses."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

import clipless
from clipless.clipping import RULES, Clipping
from clipless.errors import InvalidArgument, InvalidType, Misuse
from clipless.plan import RESERVE
from clipless.thresholds import Constant
from noising import assert_on_grid, seeded_normals
from small_run import dataset

RECORDS, WIDTH = 20, 1000


class Mean(nn.Module):
    """The negative log-likelihood of x ~ N(w, 1), one number per record."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w - x).square().sum(1) / 2


def observations() -> Tensor:
    return torch.randn(RECORDS, WIDTH, generator=torch.Generator().manual_seed(4)) + 1.5


def sampler(**options: Any) -> clipless.PosteriorSampler:
    given: dict[str, Any] = {
        "step_size": 0.05, "batch_size": RECORDS, "steps": 400, "delta": 1e-5, "seed": 3, "prior_stddev": 0.4,
        "clipping": clipless.abadi(threshold=1e3), "burn_in": 0.5, "thinning": 40,
    }  # fmt: skip
    model = Mean()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # delta above 1/(10 N)
        return clipless.sgld(model, TensorDataset(observations()), **{**given, **options})


def run(chain: clipless.PosteriorSampler) -> clipless.PosteriorSampler:
    for (x,) in chain.loader:
        chain.backward(chain._model(x))
        chain.step()
    return chain


@pytest.mark.parametrize("temperature", ["posterior", "paper-tempered", 0.25])
def test_the_samples_have_the_law_of_the_tempered_posterior(temperature: str | float) -> None:
    """1000 independent coordinates, 5 samples each, 40 steps apart (correlation 0.08). By hand: with a = 1 + 1/(N·prior²)
    the step is w ← (1 − ηa)·w + η·x̄ + s·ξ with s² = 2ητ/N, so the mean is x̄/a and the variance s²/(1 − (1 − ηa)²), which is
    τ/(N·a), that of exp(−U/τ), for small η. False alarm: 4.5 standard errors, seed fixed."""
    chain = run(sampler(temperature=temperature))
    tau = {"posterior": 1.0, "paper-tempered": RECORDS / 2}.get(str(temperature), temperature)
    assert chain.temperature == tau
    assert len(chain.samples) == 5
    kept = torch.stack([sample["w"] for sample in chain.samples]).double()
    eta, a = 0.05, 1 + 1 / (RECORDS * 0.4**2)
    variance = (2 * eta * float(tau) / RECORDS) / (1 - (1 - eta * a) ** 2)
    assert variance == pytest.approx(float(tau) / (RECORDS * a), rel=0.05)
    mean = observations().double().mean(0) / a
    scores = (kept - mean) / math.sqrt(variance)
    independent = 5 * WIDTH * (1 - 0.08) / (1 + 0.08)
    assert abs(float(scores.mean())) < 4.5 / math.sqrt(independent)
    assert abs(float(scores.square().mean()) - 1) < 4.5 * math.sqrt(2 / independent)
    chain.detach()


def antisymmetric(model: nn.Module, outputs: int, threshold: float) -> tuple[float, float]:
    """Of the Jacobian of 20 records' clipped gradients: the length of its antisymmetric part over that of the symmetric one,
    and the share of records that are clipped."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(outputs, (20,), generator=generator)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]

    def loss(weights: Tensor, one: Tensor, label: Tensor) -> Tensor:
        parts = zip(shapes.items(), weights.split(sizes), strict=True)
        named = {name: part.view(shape) for (name, shape), part in parts}
        logits = functional_call(model, named, (one,))
        return F.cross_entropy(torch.cat([torch.zeros_like(logits), logits]) if outputs == 2 else logits, label)

    def gradients(weights: Tensor) -> tuple[Tensor, Tensor]:
        own = vmap(grad(loss), (None, 0, 0))(weights, x, y)
        factors = RULES["abadi"](own.norm(dim=1), torch.tensor(threshold, dtype=own.dtype))
        return factors @ own, factors

    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    jacobian = jacrev(lambda weights: gradients(weights)[0])(start)
    share = float((gradients(start)[1] < 1).double().mean())
    return float((jacobian - jacobian.T).norm() / (jacobian + jacobian.T).norm()), share


def test_only_without_clipping_is_there_a_law_to_sample() -> None:
    """A density exp(-U/tau) belongs to a drift that is a gradient, whose Jacobian is symmetric. One output is special."""
    torch.manual_seed(0)
    softmax, logistic = nn.Linear(4, 3, bias=False).double(), nn.Linear(4, 1, bias=False).double()
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for model, outputs in ((softmax, 3), (logistic, 2), (network, 3)):
        assert antisymmetric(model, outputs, 1e3) == pytest.approx((0.0, 0.0), abs=1e-12)
    clipped = {
        name: antisymmetric(m, n, 0.5) for name, m, n in (("s", softmax, 3), ("l", logistic, 2), ("n", network, 3))
    }
    assert min(share for _, share in clipped.values()) > 0.3
    assert clipped["l"][0] < 1e-12
    assert clipped["s"][0] > 0.03
    assert clipped["n"][0] > 0.1


def test_the_papers_listing_is_a_temperature_of_half_the_records() -> None:
    """s² = η there, and σ = B/(R·√η), less what is reserved for rounding."""
    chain = sampler(temperature="paper-tempered")
    assert chain.langevin.stddev == pytest.approx(math.sqrt(0.05))
    assert chain.plan.noise_multiplier * (1 + RESERVE) == pytest.approx(RECORDS / (1e3 * math.sqrt(0.05)))
    assert "tempered by 10" in str(chain)
    assert "the posterior" in str(sampler(temperature=1.0))
    chain.detach()


@pytest.mark.parametrize("temperature", ["posterior", "paper-tempered", 3.0])
@pytest.mark.parametrize("clipping", ["abadi", clipless.global_(5.0, 2.0), clipless.auto_s(threshold=0.5)])
def test_epsilon_is_that_of_plain_training_with_the_noise_that_follows(
    temperature: str | float, clipping: str | Clipping
) -> None:
    bound = {"abadi": 1.0}.get(str(clipping), clipping.start(1).item() if isinstance(clipping, Clipping) else 1.0)
    bound *= 1 + RESERVE
    tau = {"posterior": 1.0, "paper-tempered": 30.0}.get(str(temperature), temperature)
    chain = small(step_size=0.02, temperature=temperature, clipping=clipping)
    z = math.sqrt(2 * float(tau) / (60 * 0.02)) * 12 / bound
    assert chain.plan.noise_multiplier == pytest.approx(z, rel=1e-12)
    assert chain.plan.epsilon == clipless.epsilon(chain.plan.noise_multiplier, 12 / 60, 40, 1e-5)
    chain.detach()
    back = small(epsilon=2.0, temperature=0.01, clipping=clipping)
    assert back.plan.noise_multiplier == clipless.noise_multiplier(2.0, 1e-5, 12 / 60, 40)
    assert back.step_size == pytest.approx(2 * 0.01 * (12 / (back.plan.noise_multiplier * bound)) ** 2 / 60)
    assert back.langevin.stddev == pytest.approx(math.sqrt(2 * back.step_size * 0.01 / 60))
    again = small(step_size=back.step_size, temperature=0.01, clipping=clipping)
    assert again.plan.noise_multiplier == pytest.approx(back.plan.noise_multiplier, rel=1e-9)


def small(model: nn.Module | None = None, data: Any = None, **options: Any) -> clipless.PosteriorSampler:
    torch.manual_seed(1)
    model = model or nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    given: dict[str, Any] = {"batch_size": 12, "steps": 40, "delta": 1e-5, "seed": 5, "thinning": 5}
    return clipless.sgld(model, data or dataset(), **{**given, **options})


def go(chain: clipless.PosteriorSampler, steps: int = 1000) -> clipless.PosteriorSampler:
    left = 40 - chain.private.steps_taken
    for _, (x, y) in zip(range(min(steps, left)), chain.loader, strict=False):
        chain.backward(F.cross_entropy(chain._model(x), y, reduction="none"))
        chain.step()
    return chain


def weights(chain: clipless.PosteriorSampler) -> Tensor:
    return torch.cat([p.detach().flatten() for p in chain._model.parameters()])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("groups", ["flat", "per-layer"])
def test_every_step_adds_the_noise_once(rule: str, groups: Any) -> None:
    """The weights after a step by hand: the clipped sum, the prior, and the source's normal numbers times s."""
    torch.manual_seed(1)
    how = Clipping(rule, RULES[rule], Constant(0.7), groups)
    chain = small(step_size=0.05, clipping=how, prior_stddev=0.5)
    model = chain._model
    s = math.sqrt(2 * 0.05 / 60)
    assert chain.langevin.stddev == s
    for step, (x, y) in zip(range(3), chain.loader, strict=False):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        twin = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
        twin.load_state_dict(model.state_dict())
        truth = clipless.oracle.clipped_sum(twin, losses, (x, y), how).grads
        chain.backward(losses(model, (x, y)))
        chain.step()
        normals = seeded_normals(5, "gradient", step, before.values())
        for (name, p), noise in zip(model.named_parameters(), normals, strict=True):
            drift = before[name] - 0.05 * (truth[name] / 12 + before[name] / (60 * 0.5**2))
            # The gradient is rounded to the grid of its own noise.
            assert p.grad is not None
            stddev = 12 * s / 0.05
            expected = truth[name].double() + stddev * noise
            assert_on_grid(p.grad, expected, stddev, 2e-5 * (stddev + float(expected.abs().max())), divisor=12)
            assert float((p.detach() - drift + s * noise).abs().max()) < s / 64 + 1e-5
    chain.detach()


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_samples_are_the_weights_after_the_steps_that_are_kept() -> None:
    chain, seen = small(step_size=0.02, burn_in=0.25, thinning=7), []
    for x, y in chain.loader:
        chain.backward(losses(chain._model, (x, y)))
        chain.optimizer.step()
        seen.append(weights(chain))
    kept = [torch.cat([value.flatten() for value in sample.values()]) for sample in chain.samples]
    assert len(kept) == 4
    assert all(torch.equal(sample, seen[step - 1]) for sample, step in zip(kept, (17, 24, 31, 38), strict=True))
    chain.detach()


def test_predictions_are_averaged_over_the_samples() -> None:
    chain = go(small(step_size=0.02, burn_in=0.0, thinning=10))
    x = torch.randn(9, 5)
    outputs = []
    for sample in chain.samples:
        twin = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
        twin.load_state_dict(sample)
        outputs.append(twin(x).softmax(1).detach())
    before = weights(chain)
    chain._model.train()
    found = chain.predict(x, of=lambda logits: logits.softmax(1))
    assert chain._model.training
    assert torch.equal(weights(chain), before)
    assert found.samples == len(outputs) == 4
    torch.testing.assert_close(found.mean, torch.stack(outputs).mean(0))
    torch.testing.assert_close(found.stddev, torch.stack(outputs).std(0), rtol=1e-4, atol=1e-6)
    assert not found.mean.requires_grad
    assert chain.predict(x).mean.shape == (9, 2)
    with pytest.raises(InvalidType, match="of=lambda"):
        chain.predict(x, of=lambda logits: logits.argmax(1))
    chain.detach()
    assert chain.predict(x).samples == 4  # the samples stay


def test_dropout_is_off_in_predictions_and_on_again_after() -> None:
    model = nn.Sequential(nn.Linear(5, 30), nn.Dropout(0.5), nn.Linear(30, 2))
    chain = go(small(model, step_size=0.02))
    x = torch.randn(4, 5)
    assert torch.equal(chain.predict(x).mean, chain.predict(x).mean)
    assert model[1].training
    chain.detach()


@pytest.mark.parametrize("seed", [5, None])
def test_a_chain_resumes_bit_for_bit_with_its_samples(tmp_path: Path, seed: int | None) -> None:
    whole = go(small(step_size=0.02))
    first = small(step_size=0.02, seed=seed)
    first.save_to(tmp_path / "ledger.jsonl")
    go(first, 27)
    first.save_checkpoint(tmp_path / "run.pt", extra={"note": 3})
    go(first, 6)
    lost = weights(first)
    first.detach()
    resumed = small(step_size=0.02, seed=None if seed is None else 99)
    assert resumed.load_checkpoint(tmp_path / "run.pt") == {"note": 3}
    go(resumed, 6)
    assert torch.equal(weights(resumed), lost)
    go(resumed)
    assert len(resumed.samples) == len(whole.samples) == 4
    if seed is not None:
        assert torch.equal(weights(resumed), weights(whole))
        for one, other in zip(resumed.samples, whole.samples, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)
    assert resumed.private.ledger == whole.private.ledger
    assert resumed.spent().epsilon == whole.spent().epsilon
    for chain in (whole, resumed):
        chain.detach()


def test_a_checkpoint_of_other_settings_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    first = small(step_size=0.02)
    first.save_to(tmp_path / "ledger.jsonl")
    go(first, 3)
    first.save_checkpoint(tmp_path / "run.pt")
    first.detach()
    other = small(step_size=0.02, thinning=6)
    before = weights(other)
    with pytest.raises(InvalidArgument, match="other settings"):
        other.load_checkpoint(tmp_path / "run.pt")
    assert torch.equal(weights(other), before)
    go(other, 1)
    other.detach()


def test_projections_and_schedules_of_rules_fit() -> None:
    how = clipless.schedule([(0.5, "abadi"), (0.5, clipless.global_(cutoff=3.0, threshold=1.0))])
    chain = go(small(step_size=1e-4, clipping=how, gradients="jl", projections=5))
    assert [phase.clipping.name for phase in chain.plan.phases] == ["abadi", "global"]
    assert chain.spent().epsilon > clipless.epsilon(chain.plan.noise_multiplier, 12 / 60, 40, 1e-5)
    assert len(chain.samples) == 4
    chain.detach()


@pytest.mark.parametrize("asked", [{"step_size": 0.02}, {"epsilon": 2.0}], ids=["step size", "budget"])
@pytest.mark.parametrize("temperature", ["posterior", "paper-tempered", 0.3])
def test_a_secret_number_of_records_is_replaced_by_what_rate_and_batch_suggest(
    asked: dict[str, float], temperature: str | float
) -> None:
    """Of 60 records, and of 59 and 10: the numbers are those of 60 public ones at the same rate."""
    public = small(temperature=temperature, **asked)
    secret = {"neighbours": "add-remove", "sample_rate": 12 / 60}
    for size in (60, 59, 10):
        chain = small(data=dataset(size), temperature=temperature, **asked, **secret)
        assert chain.langevin.stddev == pytest.approx(public.langevin.stddev, rel=1e-12)
        assert chain.step_size == pytest.approx(public.step_size, rel=1e-12)
        assert chain.plan.noise_multiplier == pytest.approx(public.plan.noise_multiplier, rel=1e-12)
        assert chain.plan.dataset_size is None
        assert chain.optimizer.param_groups[0]["weight_decay"] == pytest.approx(1 / 60)
    with pytest.raises(InvalidArgument, match="leave sample_rate= out"):
        small(**asked, sample_rate=0.2)


def test_a_data_loader_gives_the_batch_size() -> None:
    chain = small(data=DataLoader(dataset(), batch_size=12), batch_size=None, step_size=0.02)
    assert chain.plan.expected_batch == 12
    assert chain.plan.noise_multiplier * (1 + RESERVE) == pytest.approx(math.sqrt(2 / (60 * 0.02)) * 12)
    chain.detach()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "give one of step_size="),
    "budget and step size": ({"epsilon": 3.0, "step_size": 0.1}, "give one of step_size="),
    "noise and step size": ({"noise_multiplier": 3.0, "step_size": 0.1}, "give one of step_size="),
    "budget and noise": ({"epsilon": 3.0, "noise_multiplier": 1.0}, "give one of step_size="),
    "temperature": ({"step_size": 0.1, "temperature": "bayes"}, "Valid: 'posterior', 'paper-tempered'"),
    "no temperature": ({"step_size": 0.1, "temperature": 0.0}, "temperature must be positive"),
    "policy": ({"step_size": 0.1, "clipping": "dc-e"}, "constant threshold"),
    "decay": ({"step_size": 0.1, "clipping": "decay"}, "constant threshold"),
    "two thresholds": (
        {"step_size": 0.1, "clipping": clipless.schedule([(0.5, "abadi"), (0.5, clipless.abadi(2.0))])},
        "constant threshold",
    ),
    "allocation": (
        {"step_size": 0.1, "clipping": clipless.abadi([1.0, 2.0], groups="per-layer", allocation="equal-budget")},
        "same noise on every weight",
    ),
    "divergence": ({"epsilon": 3.0, "temperature": "paper-tempered", "prior_stddev": 0.01}, "diverges"),
    "burn in": ({"step_size": 0.1, "burn_in": 20}, "share of the steps"),
    "no sample": ({"step_size": 0.1, "thinning": 30}, "no sample would be kept"),
    "no batch size": ({"step_size": 0.1, "batch_size": None}, "batch_size"),
    "prior": ({"step_size": 0.1, "prior_stddev": 0.0}, "prior_stddev must be positive"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_together_is_refused_and_leaves_the_model_alone(given: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    with pytest.raises(InvalidArgument, match=message):
        small(model, **given)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    small(model, step_size=0.02).detach()


@pytest.mark.parametrize(("name", "value"), [("lr", 0.5), ("weight_decay", 0.0), ("momentum", 0.9)])
def test_a_changed_optimizer_is_refused_before_anything_is_released(name: str, value: float) -> None:
    chain = go(small(step_size=0.02), 2)
    chain.optimizer.param_groups[0][name] = value
    x, y = next(iter(chain.loader))
    chain.backward(losses(chain._model, (x, y)))
    with pytest.raises(Misuse, match="another temperature"):
        chain.step()
    assert chain.private.ledger.steps == 2
    chain.detach()


def test_a_step_as_a_function_samples_the_same() -> None:
    ours = go(small(step_size=0.02), 6)
    theirs = small(step_size=0.02)
    for _, batch in zip(range(6), theirs.loader, strict=False):
        theirs.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-6, atol=1e-7)


def test_sixteen_bits_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="lost in its rounding"):
        small(nn.Linear(5, 2).bfloat16(), step_size=0.02)


def test_a_model_samples_one_chain_at_a_time() -> None:
    chain = small(step_size=0.02)
    with pytest.raises(Misuse, match="private already"):
        small(chain._model, step_size=0.02)
    chain.detach()
    small(chain._model, step_size=0.02).detach()


def test_a_prediction_needs_a_sample() -> None:
    chain = go(small(step_size=0.02), 2)
    with pytest.raises(Misuse, match="no sample has been kept yet"):
        chain.predict(torch.randn(2, 5))
    chain.detach()
