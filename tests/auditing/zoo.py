"""The zoo's inmates: which game each is caught by, and after how many releases or trainings."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import sabotage
import torch
from torch import Tensor, nn

import clipless
from clipless.auditing import (
    ModelGame,
    RunGame,
    StepGame,
    Verdict,
    judge_runs,
    judge_step,
    play,
    play_model,
    play_runs,
)

SEED = 3
CONFIDENCE = 0.999


def step(releases: int, **options: object) -> Callable[[], Verdict]:
    game = StepGame(seed=SEED, **options)  # type: ignore[arg-type]
    return lambda: judge_step(play(game, releases), confidence=CONFIDENCE)


def runs(trainings: int) -> Callable[[], Verdict]:
    """One epoch of four steps with next to no noise: what is left of the promise is that records are left out."""
    game = RunGame(StepGame("abadi", 0.15, sample_rate=0.25, canaries=16, seed=SEED), steps=4)
    return lambda: judge_runs(play_runs(game, trainings), confidence=CONFIDENCE, final=True)


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(4, affine=False, track_running_stats=False), nn.Linear(4, 1, bias=False))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), nn.Linear(4, 1, bias=False))


def outputs(model: nn.Module, records: Tensor) -> Tensor:
    return model(records).squeeze(1)


def mixing(releases: int, make: Callable[[], nn.Module] = normalised) -> Callable[[], Verdict]:
    others = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    outlier = torch.tensor([50.0, -50.0, 50.0, 50.0])
    game = ModelGame(make, outputs, [others], [outlier], seed=SEED)
    return lambda: judge_step(play_model(game, releases), confidence=CONFIDENCE)


@dataclass(frozen=True)
class Inmate:
    """One sabotage, the game that catches it, how many releases (or trainings) that took, and what gives it away: the
    bound, a test of the noise, or a threshold that does not follow from what was released."""

    name: str
    sabotage: Callable[[pytest.MonkeyPatch], None]
    game: Callable[[], Verdict]
    releases: int
    by: str


def _step(
    name: str, break_it: Callable[[pytest.MonkeyPatch], None], releases: int, by: str, **options: object
) -> Inmate:
    return Inmate(name, break_it, step(releases, **options), releases, by)


PER_LAYER = clipless.auto_s(groups="per-layer")

ZOO = (
    _step("no noise", sabotage.no_noise, 256, "bound"),
    _step(
        "noise scaled by the realised batch",
        sabotage.noise_by_realised_batch,
        800,
        "noise",
        sample_rate=0.25,
        canaries=8,
    ),
    _step("noise of one rank of two", sabotage.noise_of_one_rank, 3200, "bound"),
    _step("noise of each of two ranks", sabotage.noise_of_every_rank, 256, "noise"),
    _step("a layer without noise", sabotage.skipped_layer, 256, "noise"),
    _step("a layer left out of the norm", sabotage.layer_missing_from_norm, 3200, "bound"),
    _step("a record used twice", sabotage.records_twice, 1280, "bound"),
    _step("statistic without noise", sabotage.statistic_without_noise, 60, "noise", clipping="dc-p"),
    _step(
        "per-layer sensitivity forgotten",
        sabotage.per_layer_sensitivity_forgotten,
        1280,
        "bound",
        clipping=PER_LAYER,
        layers=4,
    ),
    _step(
        "thresholds from norms without noise", sabotage.thresholds_from_true_norms, 60, "thresholds", clipping="dc-p"
    ),
    _step("noise used again after a resume", sabotage.noise_reused_after_resume, 2560, "noise", resume_after=20),
    _step("a norm underestimated by 10 %", sabotage.underestimated_norms, 16_000, "bound"),
    _step("the same noise for two layers", sabotage.correlated_coordinates, 2560, "noise"),
    Inmate("shuffled batches accounted as Poisson", sabotage.shuffled_batches, runs(25), 25, "bound"),
    Inmate("BatchNorm let through", sabotage.batch_norm_let_through, mixing(120), 120, "bound"),
)


def gives_away(verdict: Verdict) -> set[str]:
    """What speaks against the claim."""
    signs = {"bound": verdict.exceeded, "noise": bool(verdict.findings), "thresholds": not verdict.thresholds_follow}
    return {sign for sign, seen in signs.items() if seen}
