"""What the games say about a claim."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from clipless.arrays import Booleans, Floats
from clipless.auditing.family import SampledGaussian
from clipless.auditing.fit import Finding, gaussian_fit
from clipless.auditing.gauss import CanaryTrace, gauss_epsilon, gauss_kappa
from clipless.auditing.one_run_bounds import mahloujifar_epsilon, steinke_epsilon
from clipless.auditing.rates import LEAST_SCORES, Rates, gaussian_pair_mu, plain_epsilon, rates
from clipless.auditing.step_game import Releases

FALSE_ALARMS = 1e-6
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Verdict:
    """A claim and a lower bound on the same epsilon.

    `lower_bound` holds with `confidence` for releases that are Gaussian with some noise, on Poisson batches of the claimed
    rate; `plain_bound` for any mechanism whatever, and is therefore lower. `pair_bound` assumes normal releases and uses
    the values of all scores; None where they are not normal. `findings` are the tests of the noise that failed; all of them
    together fail with a probability below `FALSE_ALARMS` if the noise is as claimed.
    """

    claimed_epsilon: float
    lower_bound: float
    plain_bound: float
    pair_bound: float | None
    confidence: float
    delta: float
    games: int
    rates: Rates
    findings: tuple[Finding, ...] = ()
    thresholds_follow: bool = True

    @property
    def exceeded(self) -> bool:
        """Whether the bound exceeds the claim, which a true claim allows with probability 1 - confidence at most."""
        return self.lower_bound > self.claimed_epsilon

    @property
    def sound(self) -> bool:
        """Whether nothing speaks against the claim."""
        return not (self.exceeded or self.findings or not self.thresholds_follow)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for files."""
        return asdict(self) | {"exceeded": self.exceeded, "sound": self.sound}


def judge_step(releases: Releases, delta: float = 1e-5, confidence: float = CONFIDENCE) -> Verdict:
    """The epsilon of one step, claimed and bounded from below, and the tests of its noise."""
    family = SampledGaussian(releases.sample_rate)
    found = rates(releases.outside, releases.inside, family)
    fpr, fnr = found.upper(confidence)
    every = gaussian_fit(releases.noise, releases.groups)
    pair = gaussian_pair_mu(releases.outside, releases.inside, confidence) if releases.sample_rate == 1 else None
    return Verdict(
        claimed_epsilon=family.epsilon(releases.noise_multiplier, delta),
        lower_bound=family.epsilon(family.noise_multiplier(fpr, fnr), delta),
        plain_bound=plain_epsilon(fpr, fnr, delta),
        pair_bound=None if pair is None else family.epsilon(1 / pair if pair > 0 else float("inf"), delta),
        confidence=confidence,
        delta=delta,
        games=found.negatives + found.positives,
        rates=found,
        findings=tuple(finding for finding in every if finding.p_value < FALSE_ALARMS / len(every)),
        thresholds_follow=releases.thresholds_follow,
    )


SHARES = (0.02, 0.05, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class CanaryVerdict:
    """A claim, and what the coins guessed in one training say about it, by each analysis that applies.

    `steinke` holds for any mechanism, `mahloujifar` for one whose trade-off function is a Gaussian's, and `independent`
    (crafted canaries only, otherwise None) if the releases of different canaries are independent, as they are with
    independent noise on different coordinates. `gauss` (also for crafted canaries only) assumes in addition that the noise
    is normal, of one size and independent over steps: it uses the scores' values, not guesses. `lower_bound` is the largest;
    the confidence of each is such that all hold together.
    """

    claimed_epsilon: float
    steinke: float
    mahloujifar: float
    independent: float | None
    gauss: float | None
    confidence: float
    delta: float
    canaries: int
    guesses: int
    right: int

    @property
    def lower_bound(self) -> float:
        return max(self.steinke, self.mahloujifar, self.independent or 0.0, self.gauss or 0.0)

    @property
    def exceeded(self) -> bool:
        """Whether the bound exceeds the claim, which a true claim allows with probability 1 - confidence at most."""
        return self.lower_bound > self.claimed_epsilon

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for files."""
        return asdict(self) | {"lower_bound": self.lower_bound, "exceeded": self.exceeded}


def judge_canaries(
    scores: Floats,
    coins: Booleans,
    claimed_epsilon: float,
    delta: float,
    confidence: float = CONFIDENCE,
    independent: tuple[SampledGaussian, float] | None = None,
    trace: CanaryTrace | None = None,
) -> CanaryVerdict:
    """Guess the coins by the scores, "in" for the highest and "out" for the lowest, for several numbers of guesses.

    `independent` is the family and the noise multiplier of the claim, for crafted canaries, and `trace` what `one_run` saw
    of them.
    """
    analyses = 2 + (independent is not None) + (trace is not None)
    each = 1 - (1 - confidence) / analyses
    every = 1 - (1 - each) / len(SHARES)
    tried = [(*_guessed(scores, coins, share), share) for share in SHARES]
    steinke = [steinke_epsilon(len(coins), guesses, right, delta, every) for guesses, right, _ in tried]
    gaussian = [mahloujifar_epsilon(len(coins), guesses, right, delta, every) for guesses, right, _ in tried]
    best = max(range(len(tried)), key=lambda n: max(steinke[n], gaussian[n]))
    return CanaryVerdict(
        claimed_epsilon=claimed_epsilon,
        steinke=max(steinke),
        mahloujifar=max(gaussian),
        independent=None if independent is None else _independent(scores, coins, delta, each, *independent),
        gauss=None if trace is None else _gauss(scores, coins, delta, each, trace),
        confidence=confidence,
        delta=delta,
        canaries=len(coins),
        guesses=tried[best][0],
        right=tried[best][1],
    )


def _guessed(scores: Floats, coins: Booleans, share: float) -> tuple[int, int]:
    """Guesses made, half of them "in" and half "out", and how many are right."""
    half = max(1, round(share * len(scores) / 2))
    half = min(half, len(scores) // 2)
    order = np.argsort(scores, kind="stable")
    return 2 * half, int((~coins[order[:half]]).sum() + coins[order[len(order) - half :]].sum())


def _independent(
    scores: Floats, coins: Booleans, delta: float, confidence: float, family: SampledGaussian, noise_multiplier: float
) -> float:
    if min(int(coins.sum()), int((~coins).sum())) < LEAST_SCORES:
        return 0.0
    found = rates(scores[~coins], scores[coins], family)
    return family.epsilon(family.noise_multiplier(*found.upper(confidence), near=noise_multiplier), delta)


def _gauss(scores: Floats, coins: Booleans, delta: float, confidence: float, trace: CanaryTrace) -> float:
    return gauss_epsilon(gauss_kappa(scores[coins], scores[~coins], trace, confidence), trace.steps, delta)
