"""The whole-run game: complete trainings with and without the record, seen by their final weights or by every gradient."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from clipless.arguments import whole
from clipless.arrays import Floats
from clipless.auditing.canary_model import CanaryModel
from clipless.auditing.family import SampledGaussian
from clipless.auditing.gauss import CanaryTrace, gauss_epsilon, gauss_kappa, log_likelihood, steps_of
from clipless.auditing.rates import plain_epsilon, rates
from clipless.auditing.step_game import StepGame, attached, slots
from clipless.auditing.verdict import CONFIDENCE, Verdict
from clipless.auditing.watching import Watcher
from clipless.plan import PrivacyPlan


@dataclass(frozen=True)
class RunGame:
    """Trainings of `steps` steps of the canary model, each with `step.canaries` records in and as many out."""

    step: StepGame = field(default_factory=lambda: StepGame(sample_rate=0.25, canaries=16))
    steps: int = 8
    lr: float = 0.1


@dataclass(frozen=True)
class Trainings:
    """Scores of records that were in (`inside`) and out, from the final weights and from all released gradients; `trace`
    has the squares of those that were out."""

    final_inside: Floats
    final_outside: Floats
    all_inside: Floats
    all_outside: Floats
    trace: CanaryTrace
    noise_multiplier: float
    sample_rate: float
    steps: int
    trainings: int


def play_runs(game: RunGame, trainings: int, on_training: Callable[[], None] = lambda: None) -> Trainings:
    """Train this many times, each time with fresh noise and fresh batches."""
    final, every, squares = [], [], []
    for number in range(whole("trainings", trainings)):
        weights, gradients, sizes, plan = _train(game, number)
        final.append(weights)
        every.append(gradients)
        squares.append(sizes)
        on_training()
    half = game.step.canaries
    last, seen = np.stack(final), np.stack(every)
    return Trainings(
        final_inside=last[:, :half].ravel(),
        final_outside=last[:, half:].ravel(),
        all_inside=seen[:, :half].ravel(),
        all_outside=seen[:, half:].ravel(),
        trace=CanaryTrace(steps_of(plan), np.stack(squares)[:, half:].ravel()),
        noise_multiplier=plan.noise_multiplier,
        sample_rate=plan.sample_rate,
        steps=game.steps,
        trainings=trainings,
    )


def _train(game: RunGame, number: int) -> tuple[Floats, Floats, Floats, PrivacyPlan]:
    """The scores of every slot after one training, by its final weights and by its gradients, its squares, and the plan."""
    step = game.step
    model = CanaryModel(step.layers, 2 * step.canaries)
    records, weights = slots(step, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=game.lr)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    private = attached(step, model, optimizer, records, game.steps, number)
    watcher = Watcher(private, list(model.named_parameters()))
    ratios, squares = np.zeros((2, 2 * step.canaries))
    for (batch,) in private.loader:
        optimizer.zero_grad()
        watcher.before_step()
        private.backward(model(batch))
        optimizer.step()
        seen = weights @ watcher.after_step()
        event = private.plan.event(private.steps_taken - 1)
        ratios += log_likelihood(seen, event.gradient_multiplier, event.sample_rate)
        squares += seen**2
    private.detach()
    moved = [(old - new).detach().double().flatten() for old, new in zip(before, model.parameters(), strict=True)]
    return weights @ torch.stack(moved).numpy(), ratios, squares, private.plan


def judge_runs(seen: Trainings, delta: float = 1e-5, confidence: float = CONFIDENCE, *, final: bool) -> Verdict:
    """The epsilon of whole trainings, claimed and bounded from below, by final weights only or by all gradients."""
    family = SampledGaussian(seen.sample_rate, seen.steps)
    inside, outside = (seen.final_inside, seen.final_outside) if final else (seen.all_inside, seen.all_outside)
    found = rates(outside, inside, family)
    fpr, fnr = found.upper(confidence)
    explained = family.noise_multiplier(fpr, fnr, near=seen.noise_multiplier)
    pair = None
    if not final:
        pair = gauss_epsilon(gauss_kappa(inside, outside, seen.trace, confidence), seen.trace.steps, delta)
    return Verdict(
        claimed_epsilon=family.epsilon(seen.noise_multiplier, delta),
        lower_bound=family.epsilon(explained, delta),
        plain_bound=plain_epsilon(fpr, fnr, delta),
        pair_bound=pair,
        confidence=confidence,
        delta=delta,
        games=found.negatives + found.positives,
        rates=found,
    )
