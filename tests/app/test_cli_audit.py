"""`clipless audit`: exit codes, JSON, files, and that it finds what is broken in the configuration it is given."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clipless.app.auditing import Audit, audit
from clipless.app.cli import app
from clipless.app.commands.audit import note_on
from clipless.app.data import load
from clipless.app.settings import AuditSettings, TrainingSettings
from clipless.errors import InvalidArgument
from clipless.noise import NoiseSource

QUICK = ["audit", "--model", "linear", "--epochs", "2", "--canaries", "200", "--releases", "1280", "--seed", "1"]


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*QUICK, *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def test_json_has_the_claim_the_bound_and_the_confidence() -> None:
    record = json.loads(run("--json", "--epsilon", "4").stdout)
    assert record["confidence"] == 0.95
    assert 3.9 < record["claimed_epsilon"] <= 4
    assert 1.5 < record["lower_bound"] <= record["claimed_epsilon"]
    assert record["exceeded"] is False
    assert record["findings"] == []
    assert record["note"] is None
    assert {row["game"] for row in record["games"]} == {"step", "one-run"}
    assert record["arguments"]["model"] == "linear"
    assert record["audit"]["canaries"] == 200


def test_table_says_what_the_audit_costs(tmp_path: Path) -> None:
    result = run("--games", "step", "--out", str(tmp_path / "audit.json"), "--draw", str(tmp_path / "audit.svg"))
    assert "nothing speaks against the claim" in result.stdout
    assert "Canaries are synthetic" in result.stderr
    assert json.loads((tmp_path / "audit.json").read_text())["games"][0]["game"] == "step"
    assert (tmp_path / "audit.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("games", ["step", "one-run", "runs"])
def test_every_game_finds_missing_noise_and_exits_1(games: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = NoiseSource.release

    def broken(self: NoiseSource, stream: str, step: int, values: Any, stddevs: list[float], **further: Any) -> Any:
        return original(self, stream, step, values, [stddev / 20 for stddev in stddevs], **further)

    monkeypatch.setattr(NoiseSource, "release", broken)
    record = json.loads(run("--json", "--games", games, "--trainings", "8", code=1).stdout)
    bound = math.inf if record["lower_bound"] == "inf" else record["lower_bound"]
    assert bound > record["claimed_epsilon"]
    assert record["exceeded"] is True


def test_wrong_noise_that_breaks_no_promise_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    original = NoiseSource.release

    def broken(self: NoiseSource, stream: str, step: int, values: Any, stddevs: list[float], **further: Any) -> Any:
        return original(self, stream, step, values, [stddev * 2 for stddev in stddevs], **further)

    monkeypatch.setattr(NoiseSource, "release", broken)
    record = json.loads(run("--json", "--games", "step", code=1).stdout)
    assert record["exceeded"] is False
    assert any("more noise than claimed" in finding for finding in record["findings"])


def test_random_canaries_and_trainings_of_a_policy_with_a_statistic() -> None:
    record = json.loads(
        run("--json", "--kind", "random", "--games", "one-run,runs", "--trainings", "10", "--clipping", "dc-p").stdout
    )
    assert [row["seen"].split(",")[-1].strip() for row in record["games"][:2]] == ["white-box", "black-box"]
    assert len(record["games"]) == 4
    assert record["lower_bound"] <= record["claimed_epsilon"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clipping", "none"], "no claim"),
        (["--games", "steps"], "unknown game"),
        (["--games", "step,step"], "once"),
        (["--kind", "crafty"], "unknown kind of canary"),
        (["--confidence", "1"], "confidence"),
        (["--canaries", "0"], "at least 1"),
        (["--releases", "20"], "prove nothing"),
        (["--draw", "audit.jpeg"], "cannot draw"),
        (["--data", "digit"], "did you mean"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        CliRunner().invoke(app, [*QUICK, *arguments], catch_exceptions=False)


def found(**options: Any) -> Audit:
    settings = TrainingSettings(model="linear", epochs=1, seed=1, **options)
    return audit(load("digits"), settings, AuditSettings(releases=640, canaries=100))


@pytest.mark.parametrize(("accountant", "named"), [("gdp", True), ("pld", False)])
def test_a_refuted_claim_of_an_approximation_names_the_accountant(accountant: str, named: bool) -> None:
    settings = TrainingSettings(model="linear", epochs=1, seed=1, accountant=accountant)
    sound = audit(load("digits"), settings, AuditSettings(("step",), releases=640))
    assert note_on(replace(sound, claimed_epsilon=2 * sound.lower_bound)) is None
    note = note_on(replace(sound, claimed_epsilon=0.5 * sound.lower_bound))
    assert (note is not None and "--accountant pld" in note) == named


def test_few_canaries_prove_nothing_and_break_nothing() -> None:
    settings = TrainingSettings(model="linear", epochs=1, seed=1)
    few = audit(load("digits"), settings, AuditSettings(("one-run",), canaries=2))
    assert few.lower_bound == 0
    assert not few.failed


def test_an_audit_repeats_with_its_seed() -> None:
    first, second = found(), found()
    assert first.lower_bound == second.lower_bound
    assert [row["seen"] for row in first.games] == ["gradient of one step", "crafted canaries, white-box"]


def test_progress_ends_at_one() -> None:
    told: dict[str, list[float]] = {}
    audit(
        load("digits"),
        TrainingSettings(model="linear", epochs=1, seed=1),
        AuditSettings(("step", "one-run", "runs"), releases=640, canaries=100, trainings=3),
        lambda game, done: told.setdefault(game, []).append(done),
    )
    assert {game: (done == sorted(done), done[-1]) for game, done in told.items()} == dict.fromkeys(
        ("step", "one-run", "runs"), (True, 1.0)
    )
