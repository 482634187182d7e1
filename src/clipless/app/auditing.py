"""The audit of a training configuration: its games, and one record of what they found.

It trains copies. Real records take part in the one-run game as they would in training, and nothing is computed from them;
all scores are those of synthetic canaries.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from clipless.app import clippings, models
from clipless.app.data import Data
from clipless.app.settings import AuditSettings, TrainingSettings
from clipless.app.training.settings import optimizer_for
from clipless.auditing import (
    Canaries,
    RunGame,
    SampledGaussian,
    StepGame,
    Verdict,
    judge_canaries,
    judge_runs,
    judge_step,
    one_run,
    play,
    play_runs,
)
from clipless.errors import InvalidArgument
from clipless.plan import PrivacyPlan
from clipless.private import make_private

RELEASES, JOINT_RELEASES = 20_000, 3000
RUN_STEPS, RUN_RATE = 8, 0.25

OnGame = Callable[[str, float], None]


@dataclass(frozen=True)
class Audit:
    """What an audit found. `games` has a row for every bound, each a lower bound on the epsilon of the whole run;
    `findings` says in words what else speaks against the claim."""

    data: str
    settings: TrainingSettings
    audit: AuditSettings
    claimed_epsilon: float
    delta: float
    noise_multiplier: float
    sample_rate: float
    steps: int
    games: tuple[dict[str, Any], ...]
    findings: tuple[str, ...]
    seconds: float

    @property
    def lower_bound(self) -> float:
        return max(row["lower_bound"] for row in self.games)

    @property
    def exceeded(self) -> bool:
        """Whether the bound exceeds the claim."""
        return self.lower_bound > self.claimed_epsilon

    @property
    def failed(self) -> bool:
        """Whether anything speaks against the claim."""
        return self.exceeded or bool(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for files."""
        return {
            "claimed_epsilon": self.claimed_epsilon,
            "lower_bound": self.lower_bound,
            "confidence": self.audit.confidence,
            "delta": self.delta,
            "exceeded": self.exceeded,
            "failed": self.failed,
            "findings": list(self.findings),
            "games": list(self.games),
            "data": self.data,
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "arguments": asdict(self.settings),
            "audit": asdict(self.audit),
        }


def audit(
    data: Data, settings: TrainingSettings, how: AuditSettings, on_progress: OnGame = lambda game, done: None
) -> Audit:
    """Play the games on copies of this configuration. `on_progress` gets the game and the fraction of it that is done.

    The confidence is that of all bounds together. Raises InvalidArgument for a configuration without privacy.
    """
    if not settings.private:
        raise InvalidArgument("clipping none makes no claim that could be audited: choose a clipping.")
    clippings.parse_one(settings.clipping, "audit")
    optimizer_for(settings, data)
    if "one-run" in how.games and (data.task != "classes" or data.vocabulary):
        raise InvalidArgument(
            f"{data.name}: the game one-run needs numeric records with classes; play --games step,runs."
        )
    began = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.SeedSequence(settings.seed).generate_state(1)[0]))
        records = len(data.train) + (how.canaries if "one-run" in how.games else 0)
        plan = _plan(settings, records)
        claimed = plan.planned().spent(plan.delta, plan.accountant).epsilon
        each = 1 - (1 - how.confidence) / (len(how.games) + ("runs" in how.games))
        games: list[dict[str, Any]] = []
        findings: list[str] = []
        for game in how.games:
            for row, found in _GAMES[game](data, settings, how, plan, each, on_progress):
                games.append(row)
                findings += found
    return Audit(
        data=data.name,
        settings=settings,
        audit=how,
        claimed_epsilon=claimed,
        delta=plan.delta,
        noise_multiplier=plan.noise_multiplier,
        sample_rate=plan.sample_rate,
        steps=plan.steps,
        games=tuple(games),
        findings=tuple(findings),
        seconds=time.monotonic() - began,
    )


def _privacy(settings: TrainingSettings) -> dict[str, Any]:
    """The arguments of `make_private` that these settings stand for."""
    return {
        "epsilon": settings.epsilon if settings.noise_multiplier is None else None,
        "noise_multiplier": settings.noise_multiplier,
        "delta": settings.delta,
        "batch_size": settings.batch_size,
        "epochs": settings.epochs,
        "clipping": clippings.parse(settings.clipping),
        "accountant": settings.accountant,
        "noise": settings.noise,
        "seed": settings.seed,
        "group": False,
    }


def _plan(settings: TrainingSettings, records: int) -> PrivacyPlan:
    """The plan of a run on this many records, made as any run makes it."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, TensorDataset(torch.zeros(records, 1)), **_privacy(settings))
    private.detach()
    return private.plan


GameRows = Iterator[tuple[dict[str, Any], list[str]]]


def _step(
    data: Data, settings: TrainingSettings, how: AuditSettings, plan: PrivacyPlan, confidence: float, report: OnGame
) -> GameRows:
    """A full batch with the configuration's clipping, noise and multiplier: what a record does where it takes part."""
    clipping = clippings.parse_one(settings.clipping, "audit")
    game = StepGame(clipping, plan.noise_multiplier, noise=settings.noise, seed=settings.seed, delta=plan.delta)
    releases = how.releases or (JOINT_RELEASES if game.joint else RELEASES)
    steps = 2 * releases if game.joint else math.ceil(releases / game.canaries)
    with _timed() as seconds:
        verdict = judge_step(play(game, releases, _counter(report, "step", steps)), plan.delta, confidence)
    findings = [f"the noise of a step: {found.meaning} ({found.test} {found.value:.4g})" for found in verdict.findings]
    if not verdict.thresholds_follow:
        findings.append("a threshold was not the one that the released statistics lead to")
    seen = "gradient and statistic" if game.joint else "gradient"
    yield _composed("step", f"{seen} of one step", verdict, plan, game.noise_multiplier, 1.0, 1, seconds()), findings


def _runs(
    data: Data, settings: TrainingSettings, how: AuditSettings, plan: PrivacyPlan, confidence: float, report: OnGame
) -> GameRows:
    """Complete trainings of a tiny model with the configuration's clipping, noise and multiplier."""
    rate, steps = max(plan.sample_rate, RUN_RATE), min(plan.steps, RUN_STEPS)
    clipping = clippings.parse_one(settings.clipping, "audit")
    step = StepGame(clipping, plan.noise_multiplier, rate, 2, 16, settings.noise, settings.seed, plan.delta)
    with _timed() as seconds:
        seen = play_runs(RunGame(step, steps), how.trainings, _counter(report, "runs", how.trainings))
        for final in (True, False):
            verdict = judge_runs(seen, plan.delta, confidence, final=final)
            what = "final weights" if final else "all gradients"
            used = f"{what} of {how.trainings} tiny trainings"
            row = _composed("runs", used, verdict, plan, seen.noise_multiplier, seen.sample_rate, steps, seconds())
            yield row, []


def _one_run(
    data: Data, settings: TrainingSettings, how: AuditSettings, plan: PrivacyPlan, confidence: float, report: OnGame
) -> GameRows:
    """One training of the configuration on its own data and on canaries."""
    choice = optimizer_for(settings, data)
    lr = choice.lr if settings.lr is None else settings.lr
    model = models.build(settings.model, data.shape, data.classes)
    canaries = Canaries(how.canaries, how.kind, settings.seed)
    with _timed() as seconds:
        seen = one_run(
            model,
            lambda parameters: choice.make(parameters, lr),
            data.train,
            canaries,
            privacy=_privacy(settings),
            on_step=lambda step, steps: report("one-run", step / steps),
        )
        family = SampledGaussian(plan.sample_rate, plan.steps)
        claim = (family, plan.noise_multiplier) if how.kind == "crafted" else None
        views = {"white-box": seen.white_box} | ({} if seen.black_box is None else {"black-box": seen.black_box})
        for view, scores in views.items():
            level = 1 - (1 - confidence) / len(views)
            verdict = judge_canaries(scores, seen.coins, seen.epsilon, plan.delta, level, claim, seen.trace)
            row = {"game": "one-run", "seen": f"{how.kind} canaries, {view}", **verdict.to_dict()}
            yield row | {"seconds": round(seconds(), 1)}, []


_GAMES = {"step": _step, "one-run": _one_run, "runs": _runs}


def _composed(
    game: str,
    seen: str,
    verdict: Verdict,
    plan: PrivacyPlan,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    seconds: float,
) -> dict[str, Any]:
    """A row whose bound is the epsilon of the whole run if all its steps had the noise that explains what was seen."""
    played = SampledGaussian(sample_rate, steps)
    explained = played.noise_multiplier(*verdict.rates.upper(verdict.confidence), near=noise_multiplier)
    bound = SampledGaussian(plan.sample_rate, plan.steps).epsilon(explained, plan.delta)
    return {
        "game": game,
        "seen": seen,
        "lower_bound": bound,
        "game_claimed_epsilon": verdict.claimed_epsilon,
        "game_lower_bound": verdict.lower_bound,
        "game_plain_bound": verdict.plain_bound,
        "games": verdict.games,
        "confidence": verdict.confidence,
        "rates": asdict(verdict.rates),
        "seconds": round(seconds, 1),
    }


def _counter(report: OnGame, game: str, total: int) -> Callable[[], None]:
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        report(game, done / total)

    return count


@contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    began = time.monotonic()
    yield lambda: time.monotonic() - began
