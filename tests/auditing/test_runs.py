"""Whole trainings and one-run audits through make_private: the bound stays below the claim, and is worth something."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import clipless
from clipless.auditing import (
    Canaries,
    RunGame,
    SampledGaussian,
    Seen,
    StepGame,
    judge_canaries,
    judge_runs,
    one_run,
    play_runs,
)
from clipless.clipping import CLIPPINGS

RECORDS, FEATURES, CLASSES = 300, 6, 3


def records(features: int = FEATURES) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(RECORDS, features, generator=generator)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def audited(kind: str = "crafted", number: int = 600, features: int = FEATURES, **privacy: object) -> Seen:
    torch.manual_seed(1)
    plan = {"noise_multiplier": 0.8, "delta": 1e-5, "batch_size": 300, "epochs": 4, "clipping": "auto-s", "seed": 2}
    canaries = Canaries(number, kind, seed=3)
    return one_run(nn.Linear(features, CLASSES), _sgd, records(features), canaries, privacy=plan | privacy)


def _sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)  # type: ignore[arg-type]


def test_whole_trainings_prove_less_than_is_claimed_and_more_than_half() -> None:
    """20 trainings of 8 full batches with 32 records in and 32 out; with constant gradients the final weights say all."""
    game = RunGame(StepGame("auto-s", noise_multiplier=3.0, canaries=32, seed=1), steps=8)
    seen = play_runs(game, 20)
    by_weights, by_gradients = (judge_runs(seen, final=final) for final in (True, False))
    for verdict in (by_weights, by_gradients):
        assert 0.5 * verdict.claimed_epsilon < verdict.lower_bound <= verdict.claimed_epsilon
    assert by_weights.rates == by_gradients.rates


def test_all_gradients_say_more_than_the_final_weights_of_sampled_steps() -> None:
    """At rate 1/4 the sum of all gradients hides when the record took part."""
    seen = play_runs(RunGame(StepGame("abadi", 0.5, sample_rate=0.25, canaries=32, seed=1), steps=4), 16)
    by_weights, by_gradients = (judge_runs(seen, final=final) for final in (True, False))
    assert 0 < by_weights.lower_bound < by_gradients.lower_bound <= by_gradients.claimed_epsilon


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_crafted_canaries_bound_every_clipping(clipping: str) -> None:
    """Over 20 seeds of noise and coins, for each of six clippings, no bound was above the claim; they were 0.35 ± 0.11 of it
    (independent) and 0.72 ± 0.07 (Gaussian), the least 0.18 and 0.61. The limits are nearly three standard deviations
    below: a sound library fails for one seed in 300."""
    seen = audited(clipping=clipping)
    family = SampledGaussian(seen.plan.sample_rate, seen.plan.steps)
    verdict = judge_canaries(
        seen.white_box, seen.coins, seen.epsilon, 1e-5, 0.99, (family, seen.plan.noise_multiplier), seen.trace
    )
    assert not verdict.exceeded
    assert verdict.independent is not None
    assert verdict.gauss is not None
    assert verdict.independent > 0.02 * verdict.claimed_epsilon
    assert verdict.gauss > 0.53 * verdict.claimed_epsilon
    assert verdict.lower_bound == max(verdict.gauss, verdict.independent)
    assert verdict.steinke > 0
    assert seen.black_box is None


def test_random_canaries_are_seen_in_gradients_and_in_losses() -> None:
    """Few steps with next to no noise: the scores of canaries that were in are higher, by t tests at one in ten thousand."""
    seen = audited("random", 200, features=1000, noise_multiplier=0.05)
    assert seen.black_box is not None
    for scores in (seen.white_box, seen.black_box):
        test = stats.ttest_ind(scores[seen.coins], scores[~seen.coins], alternative="greater")
        assert test.pvalue < 1e-4
    assert judge_canaries(seen.white_box, seen.coins, seen.epsilon, 1e-5).lower_bound < seen.epsilon


def test_a_dot_product_is_that_of_the_canarys_own_gradient() -> None:
    """One full-batch step: the score of a canary is its gradient at the first weights times the released gradient."""
    torch.manual_seed(4)
    model = nn.Linear(FEATURES, CLASSES)
    before = [p.detach().clone().requires_grad_() for p in model.parameters()]
    plan = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": RECORDS + 5, "steps": 1, "seed": 2}
    data = records()
    seen = one_run(model, _sgd, data, Canaries(5, "random", seed=3), privacy=plan)
    released = [(old.detach() - new.detach()) / 0.5 for old, new in zip(before, model.parameters(), strict=True)]
    rng = np.random.default_rng(3)
    rng.random(5)
    inputs = torch.from_numpy(rng.standard_normal((5, FEATURES))).float()
    classes = torch.from_numpy(rng.integers(0, CLASSES, 5))
    for canary in range(5):
        loss = nn.functional.cross_entropy(nn.functional.linear(inputs[canary], *before), classes[canary])
        gradients = torch.autograd.grad(loss, before)
        product = sum(float((g * r).sum()) for g, r in zip(gradients, released, strict=True))
        assert seen.white_box[canary] == pytest.approx(product, rel=1e-3, abs=1e-5)


def test_crafted_canaries_leave_the_model_alone() -> None:
    """Under one seed of the noise the model's weights are the same whichever canaries are in and whatever they hold."""
    trained, coins = [], []
    for seed in (3, 4):
        torch.manual_seed(1)
        model = nn.Linear(FEATURES, CLASSES)
        plan = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 50, "epochs": 2, "seed": 2}
        coins.append(one_run(model, _sgd, records(), Canaries(40, seed=seed), privacy=plan).coins)
        trained.append(model.weight.detach())
    assert (coins[0] != coins[1]).any()
    assert torch.allclose(*trained, rtol=1e-5)


def test_what_cannot_be_audited_is_refused() -> None:
    with pytest.raises(clipless.InvalidArgument, match="kind of canary"):
        Canaries(10, "crafty")
    with pytest.raises(clipless.InvalidArgument, match="at least 1"):
        Canaries(0)
    with pytest.raises(clipless.InvalidArgument, match="step game"):
        audited(clipping=clipless.auto_s(groups="per-layer"))
    with pytest.raises(clipless.InvalidArgument, match="inputs and classes"):
        one_run(nn.Linear(1, 2), _sgd, TensorDataset(torch.zeros(3, 1)), Canaries(4), privacy={})
    numbers, classes = torch.zeros(3, 1), torch.zeros(3, dtype=torch.long)
    for inputs, targets, message in (
        (numbers[:0], classes[:0], "no records"),
        (numbers.long(), classes, "floating-point inputs"),
        (numbers, numbers, "class number"),
    ):
        with pytest.raises(clipless.InvalidArgument, match=message):
            one_run(nn.Linear(1, 2), _sgd, TensorDataset(inputs, targets), Canaries(4), privacy={})
