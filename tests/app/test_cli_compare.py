"""`clipless compare`: its table, figure, advice and price; what is stored is not run again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from clipless.accounting import Ledger
from clipless.app import comparing
from clipless.app.comparing import Compared, ComparisonPrice, advice, price_text
from commanding import run_main

ARGUMENTS = [
    "compare",
    "--model",
    "linear",
    "--epochs",
    "1",
    "--clippings",
    "auto-s,dc-p(bins=30),none",
    "--out",
    "out",
]


def compared(clipping: str, *scores: float, metric: str = "accuracy", higher: bool = True) -> Compared:
    return Compared(clipping, metric, higher, scores, None if clipping == "none" else 3.0, 1e-5, 1.0)


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: run_main([*ARGUMENTS, *arguments], tmp_path, capsys)


def test_table_figure_advice_and_price(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done = command("--seeds", "2")
    assert done.returncode == 0, done.stderr
    for words in ("auto-s", "dc-p(bins=30)", "no privacy", "±", "Take ", "not private"):
        assert words in done.stdout
    for words in (
        "this may differ",
        "the 4 private runs together cost epsilon",
        "2 runs had no privacy",
        "test records",
    ):
        assert words in done.stderr
    assert "<svg" in (tmp_path / "out/compare.svg").read_text()
    record = json.loads((tmp_path / "out/compare.json").read_text())
    stored = [json.loads(path.read_text()) for path in sorted((tmp_path / "out/runs").glob("*.json"))]
    assert sorted(score for one in record["clippings"] for score in one["scores"]) == sorted(
        one["score"] for one in stored
    )
    together = Ledger()
    for one in stored:
        for event, count in Ledger.from_dict(one["ledger"]).events if one["ledger"] else ():
            together.record(event, count)
    spent = together.spent(stored[0]["delta"], "pld").epsilon
    assert record["cost_if_private"]["epsilon"] == pytest.approx(spent, rel=1e-6)
    assert record["cost_if_private"]["epsilon"] > 1.5 * stored[0]["epsilon"]
    assert len({one["score"] for one in stored}) > 2

    monkeypatch.setattr(comparing, "train", lambda *_, **__: pytest.fail("a stored run was run again"))
    again = command("--seeds", "2", "--json")
    assert json.loads(again.stdout)["clippings"] == record["clippings"]
    other = command("--seeds", "2", "--lr", "0.3")
    assert other.returncode == 2
    assert "choose another folder (--out)" in other.stderr
    (tmp_path / "out/runs/auto-s-0.json").write_text("{")
    assert command("--seeds", "2").returncode == 4


def test_no_noise_can_be_repeated_unless_a_seed_is_asked_for(tmp_path: Path, command: Any) -> None:
    found = json.loads(command("--seeds", "1", "--json").stdout)
    assert not any("seed" in note for note in found["notes"])
    assert found["clippings"][0]["interval"] is None
    first = json.loads(command("--seeds", "1", "--seed", "5", "--out", "one", "--json").stdout)
    second = json.loads(command("--seeds", "1", "--seed", "5", "--out", "two", "--json").stdout)
    assert [one["scores"] for one in first["clippings"]] == [one["scores"] for one in second["clippings"]]
    assert any("whoever knows it can subtract the noise" in note for note in first["notes"])
    assert first["cost_if_private"]["seeded"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clippings", "auto-s,abadii"], "did you mean 'abadi'"),
        (["--clippings", ","], "nothing to compare"),
        (["--format", "jpg"], "end its name in"),
        (["--optimizer", "sdg"], "did you mean 'sgd'"),
        (["--data", "digitz"], "did you mean 'digits'"),
    ],
)
def test_mistakes_are_refused_before_training(
    command: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(comparing, "train", lambda *_, **__: pytest.fail("trained"))
    done = command(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_best_private_one_is_taken_if_it_stands_out() -> None:
    far = [compared("none", 0.99, 0.99), compared("auto-s", 0.5, 0.51, 0.52), compared("abadi", 0.9, 0.91, 0.92)]
    assert advice(far).startswith("Take abadi: its accuracy is the best")
    losses = [replace(one, higher_is_better=False, metric="loss_per_token") for one in far]
    assert advice(losses).startswith("Take auto-s: its loss per token is the best")


def test_ties_go_to_the_one_without_a_threshold_and_are_named() -> None:
    near = [compared("auto-s", 0.90, 0.93, 0.88), compared("abadi", 0.91, 0.92, 0.90), compared("dc-p", 0.5, 0.51, 0.5)]
    assert advice(near) == (
        "Take auto-s: these runs do not tell it from abadi, and it has no threshold to set. The best mean is that of abadi: "
        "more seeds may decide."
    )
    assert "do not tell it from" in advice([compared("abadi", 0.9), compared("dc-e", 0.2)])
    assert "only private" in advice([compared("abadi", 0.9), compared("none", 1.0)])
    assert "Nothing private" in advice([compared("none", 1.0)])


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ((0.9, 0.9), (0.9, 0.9), False),
        ((0.9, 0.9), (0.8, 0.9), False),
        ((0.9, 0.9, 0.9), (0.5, 0.51, 0.52), True),
        ((0.9, 0.91, 0.92), (0.5, 0.5, 0.5), True),
        ((0.9, 0.9), (0.5, 0.5), True),
        ((0.1 + 0.2, 0.3), (0.3, 0.3), False),
    ],
)
def test_runs_with_the_same_score_are_a_result_like_any_other(
    one: tuple[float, ...], other: tuple[float, ...], apart: bool
) -> None:
    """Two runs of a linear model are often equally accurate."""
    said = advice([compared("abadi", *one), compared("dc-p", *other)])
    assert ("beyond the spread of these runs" in said) == apart
    assert ("do not tell it from dc-p" in said) != apart


def test_runs_are_told_apart_by_welchs_test() -> None:
    """At its level, for scores of every spread and number, as scipy finds it."""
    numbers, found = np.random.default_rng(0), []
    for _ in range(100):
        scores = [
            tuple(0.5 + numbers.normal(size=numbers.integers(2, 6)) * 10.0 ** numbers.uniform(-3, 0)) for _ in range(2)
        ]
        one, other = (compared(name, *given) for name, given in zip(("abadi", "dc-p"), scores, strict=True))
        found.append(stats.ttest_ind(*scores, equal_var=False).pvalue < comparing.LEVEL)
        assert ("beyond the spread of these runs" in advice([one, other])) == found[-1]
    assert {*found} == {True, False}


def test_runs_that_diverged_are_not_taken_and_can_be_stored() -> None:
    nan = float("nan")
    lost = compared("dc-p", nan, nan, metric="squared_error", higher=False)
    kept = compared("abadi", 3.0, 3.1, metric="squared_error", higher=False)
    assert advice([lost, kept]).startswith("Take abadi")
    assert json.loads(json.dumps(lost.to_dict(), allow_nan=False))["scores"] == ["nan", "nan"]


def test_an_epsilon_is_rounded_up_and_runs_without_privacy_are_named() -> None:
    text = " ".join(price_text(ComparisonPrice(runs=6, epsilon=9.00001, delta=1e-5, plain_runs=3, seeded=False)))
    assert "epsilon 9.001 at delta 1e-05" in text
    assert "3 runs had no privacy" in text
