"""The long audit behind docs/audit.md: `python experiments/audit.py --mnist FOLDER`, some ten minutes on two cores.

Results go to docs/figures/audit.json with their configuration; the page is written from there, alone with `--only page`.
"""

import argparse
import json
import platform
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "auditing"), str(ROOT / "experiments")]

import audit_page
import numpy as np
import pytest
import zoo

from clipless.accounting import StepEvent
from clipless.app.auditing import audit
from clipless.app.data import load
from clipless.app.settings import AuditSettings, TrainingSettings
from clipless.auditing import (
    CanaryTrace,
    RunGame,
    StepGame,
    Verdict,
    gauss_epsilon,
    gauss_kappa,
    judge_runs,
    judge_step,
    play,
    play_runs,
)
from clipless.auditing.gauss import Floats, Steps, gauss_refutes, log_likelihood
from clipless.clipping import CLIPPINGS
from clipless.noise import NOISE_SOURCES

DELTA = 1e-5
# (rate, multiplier, steps); the last two are about those of the trainings on MNIST.
FALSE_ALARMS = ((1.0, 2.0, 4), (0.25, 1.0, 8), (0.001, 0.4, 200), (0.0158, 0.73, 126), (0.0158, 0.52, 126))


def steps(clippings: Iterable[str] = tuple(CLIPPINGS), share: float = 1.0) -> list[dict[str, Any]]:
    """One step at multiplier 1, for every clipping and noise source."""
    rows = []
    for clipping in clippings:
        for noise in NOISE_SOURCES:
            seed = None if noise == "secure" else secrets.randbits(64)
            game = StepGame(clipping, noise=noise, seed=seed, delta=DELTA)
            releases = round(share * (8000 if game.joint else 100_000))
            began = time.process_time()
            verdict = judge_step(play(game, releases), DELTA)
            seen = "gradient and statistic" if game.joint else "gradient"
            rows.append(row(verdict, began) | {"clipping": clipping, "noise": noise, "seen": seen})
    return rows


def runs() -> list[dict[str, Any]]:
    """400 trainings of 8 steps, with 16 records in and 16 out, at rates 1 and 1/4."""
    rows = []
    for multiplier, rate in ((3.0, 1.0), (1.0, 0.25)):
        game = RunGame(StepGame("auto-s", multiplier, rate, canaries=16, delta=DELTA), steps=8)
        began = time.process_time()
        seen = play_runs(game, 400)
        for final in (True, False):
            verdict = judge_runs(seen, DELTA, final=final)
            what = "final weights" if final else "all gradients"
            rows.append(row(verdict, began) | {"multiplier": multiplier, "rate": rate, "trainings": 400, "seen": what})
    return rows


def row(verdict: Verdict, began: float) -> dict[str, Any]:
    kept = ("claimed_epsilon", "lower_bound", "plain_bound", "pair_bound", "confidence", "games")
    found = verdict.to_dict()
    return {name: found[name] for name in kept} | {
        "sound": verdict.sound,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def false_alarms(runs: int = 1000, canaries: int = 1000) -> list[dict[str, Any]]:
    """The Gaussian form on simulated trainings that keep their claim exactly: how often is it refuted at 95 %, and which
    bound has the middle one of 25?"""
    rows = []
    for rate, multiplier, steps in FALSE_ALARMS:
        claim = ((StepEvent(rate, multiplier), steps),)
        rng, refuted, bounds = np.random.default_rng(0), 0, []
        for number in range(runs):
            there, gone, trace = simulated(claim, canaries, rng)
            refuted += gauss_refutes(1.0, there, gone, trace, 0.95)
            if number < 25:
                bounds.append(gauss_epsilon(gauss_kappa(there, gone, trace, 0.95), claim, DELTA))
        claimed = gauss_epsilon(1.0, claim, DELTA)
        rows.append(
            {"rate": rate, "multiplier": multiplier, "steps": steps, "canaries": canaries, "claimed_epsilon": claimed}
            | {"runs": runs, "refuted": refuted, "lower_bound": float(np.median(bounds))}
        )
    return rows


def simulated(claim: Steps, canaries: int, rng: np.random.Generator) -> tuple[Floats, Floats, CanaryTrace]:
    """Scores of canaries that are in and out, and their trace, in a training that keeps its claim exactly."""
    ((event, steps),) = claim
    rate, multiplier = event.sample_rate, event.gradient_multiplier
    inside, outside = rng.normal(size=(2, steps, canaries // 2))
    inside += (rng.random(inside.shape) < rate) / multiplier
    there, gone = (log_likelihood(seen, multiplier, rate).sum(0) for seen in (inside, outside))
    return there, gone, CanaryTrace(claim, (outside**2).sum(0))


def spread(runs: int = 400, canaries: int = 5000) -> list[dict[str, Any]]:
    """How the bound of one training on MNIST varies if the claim is kept exactly, at the confidence that the audit leaves
    to each of four analyses."""
    rows = []
    for (rate, multiplier, steps), epsilon in zip(FALSE_ALARMS[-2:], (3.0, 8.0), strict=True):
        claim, rng = ((StepEvent(rate, multiplier), steps),), np.random.default_rng(5)
        claimed, bounds = gauss_epsilon(1.0, claim, DELTA), []
        for _ in range(runs):
            there, gone, trace = simulated(claim, canaries, rng)
            bounds.append(gauss_epsilon(gauss_kappa(there, gone, trace, 1 - 0.05 / 4), claim, DELTA) / claimed)
        found = {"mean": np.mean(bounds), "stddev": np.std(bounds, ddof=1), "least": np.quantile(bounds, 0.001)}
        rows.append(
            {"epsilon": epsilon, "runs": runs, "canaries": canaries}
            | {name: round(float(value), 3) for name, value in found.items()}
        )
    return rows


def inmates() -> list[dict[str, Any]]:
    rows = []
    for inmate in zoo.ZOO:
        with pytest.MonkeyPatch.context() as patch:
            inmate.sabotage(patch)
            verdict = inmate.game()
        signs = sorted(zoo.gives_away(verdict))
        tests = sorted({finding.test.split(",")[0] for finding in verdict.findings})
        bound = "inf" if verdict.lower_bound == float("inf") else verdict.lower_bound
        rows.append(
            {"name": inmate.name, "releases": inmate.releases, "claimed_epsilon": verdict.claimed_epsilon}
            | {"lower_bound": bound, "by": signs, "tests": tests, "caught": not verdict.sound}
        )
    return rows


def mnist(folder: str) -> list[dict[str, Any]]:
    """One training each at epsilon 3 and 8, with crafted canaries, and with random ones at 8."""
    data = load(folder)
    rows = []
    for epsilon, kind, canaries in ((3.0, "crafted", 5000), (8.0, "crafted", 5000), (8.0, "random", 500)):
        settings = TrainingSettings("cnn", "auto-s", epsilon, DELTA, epochs=2, batch_size=1024, lr=0.4)
        began = time.process_time()
        found = audit(data, settings, AuditSettings(("one-run",), canaries=canaries, kind=kind))
        rows.append(found.to_dict() | {"data": "MNIST", "cpu_seconds": round(time.process_time() - began, 1)})
        sys.stderr.write(f"{epsilon} {kind}: {found.lower_bound:.3g}, {found.seconds:.0f} s\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", help="folder with the four idx files of MNIST")
    parts = ("steps", "runs", "gauss", "spread", "zoo", "mnist", "page")
    parser.add_argument("--only", choices=parts, action="append", help="part of the audit; repeatable")
    parser.add_argument("--quick", action="store_true", help="a sample of the games, which is not kept, and the page")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the page and its figures")
    chosen = parser.parse_args()
    kept = chosen.docs / "figures" / "audit.json"
    stored: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    if chosen.quick:
        assert all(row["sound"] for row in steps(["auto-s"], share=0.02))
        chosen.only = ["page"]
    work: dict[str, Callable[[], Any]] = {
        "steps": steps,
        "runs": runs,
        "gauss": false_alarms,
        "spread": spread,
        "zoo": inmates,
    }
    if chosen.mnist:
        work["mnist"] = lambda: mnist(chosen.mnist)
    for name, part in work.items():
        if chosen.only is None or name in chosen.only:
            stored[name] = part()
            stored["made"] = {
                "date": datetime.now(UTC).date().isoformat(),
                "machine": f"{platform.machine()}, {platform.system()}",
                "versions": {package: version(package) for package in ("clipless", "torch", "numpy", "scipy")},
            }
            kept.write_text(json.dumps(stored, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (chosen.docs / "audit.md").write_text(audit_page.page(stored), encoding="utf-8")


if __name__ == "__main__":
    main()
