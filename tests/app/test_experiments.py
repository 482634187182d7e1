"""Experiments: the configurations, a grid that goes on where it stopped, tables, figures and the page of results."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from typer.testing import CliRunner

from clipless.accounting import StepEvent
from clipless.accounting.selection import LiuTalwar
from clipless.app import clippings
from clipless.app.cli import app
from clipless.app.data import DATA, load
from clipless.app.data.features import FEATURES, Feature, refuse_unknown
from clipless.app.data.sentences import NAME as MINILM
from clipless.app.models import MODELS, TEXT_MODELS
from clipless.app.reproduce import experiment, reproduction, results_page, running
from clipless.app.reproduce.choosing import read as read_choice
from clipless.app.reproduce.configuration import Configuration, Published, configurations, parse
from clipless.app.reproduce.pictures import PICTURES
from clipless.app.reproduce.summary import TableLine, differences, differences_table, interval, lines, markdown
from clipless.app.training import Saving, train
from clipless.errors import CliplessError, Interrupted, InvalidArgument

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
STORED = results_page.stored_results(RESULTS)
SMALL = """
title = "Digits"
source = "no paper"
data = "digits"
seeds = 2
note = "Tiny."
readme = ["AUTO-S", "plain"]
measure = ["confidence", "norms"]

[settings]
model = "linear"
epochs = 1
batch_size = 300

[grid]
epsilon = [3.0, 8.0]

[[rows]]
name = "AUTO-S"
settings = { clipping = "auto-s" }

[[rows]]
name = "DC-E"
settings = { clipping = "dc-e", epsilon = 5.0 }

[[rows]]
name = "plain"
settings = { clipping = "none" }

[[published]]
row = "AUTO-S"
epsilon = 8.0
value = 90.5
interval = 0.5

[figure]
kind = ["bars", "curves"]
x = "epsilon"

[quick]
rows = ["AUTO-S"]
grid = { epsilon = [3.0] }
"""


@pytest.fixture(scope="module")
def small() -> Configuration:
    return parse("small", SMALL)


@pytest.fixture(scope="module")
def folder(small: Configuration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of the small experiment."""
    made = tmp_path_factory.mktemp("small")
    running.run_grid(small, made, lambda *_: None)
    return made


@pytest.mark.parametrize("name", configurations())
def test_every_configuration_can_be_run(name: str) -> None:
    one = configurations()[name]
    assert one.title
    name, *features = one.data.split("+")
    assert name in DATA
    if features and features != [MINILM]:
        refuse_unknown(features)
    for version in (one, one.quickly()):
        cells = version.cells()
        assert len({cell.stem for cell in cells}) == len(cells)
        for cell in cells:
            assert cell.settings.model in (*MODELS, *TEXT_MODELS)
            assert not cell.settings.private or clippings.parse(cell.settings.clipping)
    assert len(one.quickly().cells()) < len(one.cells())
    for published in one.published:
        assert any(one.published_for(cell.row, cell.point) == published for cell in one.cells()), published
    kinds = one.figure.get("kind", "bars")
    assert {kinds} if isinstance(kinds, str) else set(kinds) <= set(PICTURES)


def test_a_grid_has_every_combination_and_a_row_without_privacy_no_epsilon(small: Configuration) -> None:
    found = [(cell.row, cell.settings.epsilon, cell.settings.seed) for cell in small.cells()]
    assert found[:4] == [("AUTO-S", 3.0, 0), ("AUTO-S", 8.0, 0), ("DC-E", 5.0, 0), ("plain", 3.0, 0)]
    assert len(found) == 8
    assert [dict(cell.point) for cell in small.cells(1)] == [{"epsilon": 3.0}, {"epsilon": 8.0}, {}, {}]


def test_a_stored_run_is_not_run_again_and_a_changed_one_is(small: Configuration, folder: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in (folder / running.RUNS).iterdir()}
    assert len(files) == 8
    running.run_grid(small, folder, lambda *_: None)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    changed = replace(small, settings={**small.settings, "batch_size": 200})
    assert all(running.stored(folder, cell) is None for cell in changed.cells())


def test_a_run_stored_before_a_setting_existed_counts(small: Configuration, folder: Path, tmp_path: Path) -> None:
    cell = small.cells()[0]
    record = running.stored(folder, cell)
    assert record is not None
    older = {name: value for name, value in record["settings"].items() if name != "averaging"}
    for settings, counts in ((older, True), (older | {"averaging": 0.5}, False), ({}, False)):
        running.write_record(tmp_path / running.RUNS / f"{cell.stem}.json", record | {"settings": settings})
        assert (running.stored(tmp_path, cell) is not None) == counts


@pytest.mark.parametrize("name", STORED)
def test_stored_runs_have_the_delta_that_their_experiment_states(name: str) -> None:
    """None follows from a default, which may change."""
    known, content = configurations()[name], STORED[name]
    assert {run["delta"] for run in content["runs"] if run["private"]} == {known.settings["delta"]}


@pytest.mark.parametrize("name", ["auto-gamma", "auto-grid", "dc-ablations", "unit-gradients"])
def test_runs_stored_before_their_delta_was_stated_still_count(name: str, tmp_path: Path) -> None:
    known = configurations()[name]
    assert {run["settings"]["delta"] for run in STORED[name]["runs"]} == {None}
    running.take_over(RESULTS / f"{name}.json", tmp_path, known.cells())
    assert len(running.finished(known, tmp_path, known.cells())) == len(known.cells())
    changed = replace(known, settings={**known.settings, "delta": 1e-5})
    assert not running.finished(changed, tmp_path, changed.cells())


def test_a_papers_large_delta_is_not_warned_of_in_every_run(small: Configuration, tmp_path: Path) -> None:
    cell = small.cells()[0]
    large = replace(cell, settings=replace(cell.settings, delta=1e-2))
    with pytest.warns(UserWarning, match=r"is above 1/\(10 N\) for N=1437"):
        train(load("digits"), large.settings, group=False)
    running.run_cell(large, None, str(tmp_path), resume=False)  # a warning would be an error here
    assert running.stored(tmp_path, large) is not None


def test_a_grid_that_was_interrupted_goes_on(small: Configuration, folder: Path, tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop_at_third(what: str, done: float, total: float) -> None:
        if done == 2:
            raise Stopped

    with pytest.raises(Stopped):
        running.run_grid(small, tmp_path, stop_at_third)
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / running.RUNS).iterdir()}
    assert len(kept) == 2
    seen: list[tuple[float, float]] = []
    records = running.run_grid(small, tmp_path, lambda _, done, total: seen.append((done, total)))
    assert seen[0] == (2.0, 8.0)
    assert seen[-1] == (8.0, 8.0)
    assert all((tmp_path / running.RUNS / name).stat().st_mtime_ns == time for name, time in kept.items())
    whole = running.finished(small, folder, small.cells())
    assert [record["score"] for record in records] == [record["score"] for record in whole]


def test_a_record_has_its_plan_and_what_was_spent_by_every_accountant(small: Configuration, folder: Path) -> None:
    private, *_, plain = running.finished(small, folder, small.cells(1))
    assert private["plan"]["epsilon"] == 3.0
    assert private["epsilon"] == private["epsilons"]["pld"] <= 3.0
    assert private["epsilons"]["rdp"] > private["epsilons"]["pld"]
    assert (plain["epsilon"], plain["plan"], plain["private"]) == (None, None, False)


def test_a_damaged_record_is_refused_by_name(small: Configuration, tmp_path: Path) -> None:
    cell = small.cells()[0]
    (tmp_path / running.RUNS).mkdir()
    (tmp_path / running.RUNS / f"{cell.stem}.json").write_text("{")
    with pytest.raises(CliplessError, match=rf"{cell.stem}\.json is not JSON"):
        running.stored(tmp_path, cell)


def test_nothing_is_left_of_the_checkpoints_of_finished_runs(small: Configuration, tmp_path: Path) -> None:
    long = replace(small, resume=True, rows=small.rows[:1], seeds=1, measure=())
    assert len(running.run_grid(long, tmp_path, lambda *_: None)) == 2
    assert not list((tmp_path / running.UNFINISHED).iterdir())


def test_means_intervals_and_published_numbers_stand_side_by_side(small: Configuration, folder: Path) -> None:
    records = running.finished(small, folder, small.cells())
    found = lines(small, records)
    assert [(line.row, len(line.scores)) for line in found] == [("AUTO-S", 2), ("AUTO-S", 2), ("DC-E", 2), ("plain", 2)]
    scores = [100 * one["score"] for one in records if one["row"] == "AUTO-S" and one["point"] == {"epsilon": 8.0}]
    assert found[1].mean == pytest.approx(sum(scores) / 2)
    assert found[1].interval is None
    assert found[1].text == f"{sum(scores) / 2:.2f} ({scores[0]:.2f}, {scores[1]:.2f})"
    assert interval(scores) == pytest.approx(12.7062 * abs(scores[0] - scores[1]) / 2, rel=1e-4)
    table = markdown(found).splitlines()
    assert "90.50 ± 0.50" in table[3]
    assert "90.50" not in table[2]
    assert "not private" in table[-1]
    assert interval([1.0]) is None


def test_results_table_and_figures_are_written(small: Configuration, folder: Path) -> None:
    result = experiment.written(small, folder, "png")
    stems = {Path(file).stem for file in result.figures}
    assert stems == {
        f"small-{name}" for name in ("bars", "curves", "thresholds", "shares", "norms", "errors", "reliability")
    }
    assert all(Path(file).read_bytes().startswith(b"\x89PNG") for file in result.figures)
    stored = json.loads((folder / experiment.RESULTS).read_text())
    assert stored["missing_runs"] == 0
    assert len(stored["runs"]) == 8
    assert stored["plans"]["AUTO-S, epsilon 3.0"]["epsilon"] == 3.0
    assert experiment.NOT_PRIVATE in result.page.read_text(encoding="utf-8")


def test_a_reliability_diagram_has_all_seeds_together_and_no_bin_of_few_records(small: Configuration) -> None:
    def run(
        confidence: list[float | None], accuracy: list[float | None], counts: list[int], ece: float
    ) -> dict[str, Any]:
        bins = {"confidence": confidence, "accuracy": accuracy, "counts": counts, "true_class": [1] * 20}
        return {"row": "local", "extra": {"ECE": ece, "reliability": bins}}

    records = [
        run([0.1, None, 0.9], [1.0, None, 0.6], [1, 0, 100], 0.2),
        run([0.1, 0.5, 0.7], [0.0, 0.5, 0.0], [1, 40, 300], 0.4),
    ]
    left, _ = PICTURES["reliability"](small, [], records).axes
    _, drawn = left.lines
    assert drawn.get_label() == "local: ECE 0.300"
    assert drawn.get_xdata() == pytest.approx([0.5, 0.75])
    assert drawn.get_ydata() == pytest.approx([0.5, 0.15])


def test_page_and_readme_are_made_of_what_is_stored(
    small: Configuration, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment.written(small, folder, "png")
    monkeypatch.setattr(results_page, "configurations", lambda: {"small": small})
    store = tmp_path / "results"
    store.mkdir()
    stored = json.loads((folder / experiment.RESULTS).read_text())
    dropped = [run for run in stored["runs"] if run["row"] == "plain"][:1]
    other = {**dropped[0], "settings": {**dropped[0]["settings"], "lr": 77.0}}
    stored["runs"] = [run for run in stored["runs"] if run not in dropped] + [other]
    (store / "small.json").write_text(json.dumps(stored))
    page, readme = tmp_path / "results.md", tmp_path / "README.md"
    readme.write_text("before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n")
    results_page.write_page(store, page)
    results_page.write_readme(store, readme)
    text = page.read_text(encoding="utf-8")
    assert "## small: Digits" in text
    assert "1 of 8 runs of this experiment have not been run." in text
    for name in ("bars", "norms"):
        assert f"figures/results/small-{name}.png" in text
        assert (tmp_path / "figures" / "results" / f"small-{name}.png").exists()
    rows = [line for line in readme.read_text(encoding="utf-8").splitlines() if line.startswith("| small")]
    assert len(rows) == 2, "rows that are not named for the README are on the page only"
    assert "| small | AUTO-S | 2.99; 7.98, pld |" in rows[0]
    assert "| -; 90.50 ± 0.50 |" in rows[0]
    assert "| small | plain | not private |" in rows[1]


def test_a_row_that_is_not_there_cannot_be_named_for_the_readme() -> None:
    with pytest.raises(InvalidArgument, match="DC-P"):
        parse("small", SMALL.replace('readme = ["AUTO-S", "plain"]', 'readme = ["DC-P"]'))


def test_the_readme_of_the_repository_shows_what_is_stored(tmp_path: Path) -> None:
    here, again = ROOT / "README.md", tmp_path / "README.md"
    again.write_bytes(here.read_bytes())
    results_page.write_readme(ROOT / "experiments" / "results", again)
    assert again.read_text(encoding="utf-8") == here.read_text(encoding="utf-8")


CURVES = """
title = "Digits"
source = "ours"
data = "digits"
seeds = 1

[settings]
epochs = 1

[grid]
epsilon = [1.0, 4.0]

[[rows]]
name = "A"
settings = { clipping = "auto-s" }

[[rows]]
name = "B"
settings = { clipping = "abadi", epsilon = 2.0 }

[[rows]]
name = "C"
settings = { clipping = "none" }

[figure]
kind = "curves"
x = "epsilon"
"""


def test_a_row_that_has_the_setting_of_the_axis_by_itself_is_a_point() -> None:
    def line(row: str, point: dict[str, Any], score: float) -> TableLine:
        return TableLine(row, point, "accuracy", (score,), None, {}, None, None, {})

    found = [
        line("A", {"epsilon": 4.0}, 92.0),
        line("A", {"epsilon": 1.0}, 90.0),
        line("B", {}, 95.0),
        line("C", {}, 99.0),
    ]
    (axes,) = PICTURES["curves"](parse("curves", CURVES), found, []).axes
    drawn = [(list(each.get_xdata()), list(each.get_ydata())) for each in axes.get_lines() if len(each.get_xdata())]
    assert ([1.0, 4.0], [90.0, 92.0]) in drawn
    assert ([2.0], [95.0]) in drawn
    assert [y for _, y in drawn if y == [99.0, 99.0]]  # from side to side
    assert axes.get_xticks().tolist() == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("scores", "shown", "half"),
    [((90.0, 91.0, 91.0, 92.0), [90.0, 91.0, 91.0, 92.0], 0.0), ((90.0, 91.0, 91.0, 91.0, 92.0), None, 0.878)],
)
def test_curves_of_four_seeds_show_all_and_of_five_the_interval(
    scores: tuple[float, ...], shown: list[float] | None, half: float
) -> None:
    line = TableLine("A", {"epsilon": 1.0}, "accuracy", scores, None, {}, None, None, {})
    (axes,) = PICTURES["curves"](parse("curves", CURVES), [line], []).axes
    runs = [
        list(each.get_ydata()) for each in axes.get_lines() if each.get_marker() == "_" and len(each.get_ydata()) > 1
    ]
    assert runs == ([] if shown is None else [shown])
    (bar,) = axes.collections[0].get_segments()
    assert bar[:, 1] == pytest.approx([91 - half, 91 + half], abs=1e-3)


def test_a_row_of_the_readme_has_its_points_side_by_side() -> None:
    def line(point: dict[str, Any], epsilon: float | None, published: float | None) -> TableLine:
        paper = None if published is None else Published("A", published, None, {})
        return TableLine("A", point, "accuracy", (95.0 + (epsilon or 0.0),), epsilon, {}, None, paper, {})

    def row(*found: TableLine, accountants: Sequence[str]) -> str:
        pairs = zip(found, accountants, strict=True)
        records = [{"row": "A", "point": each.point, "settings": {"accountant": name}} for each, name in pairs]
        return results_page._readme_row("id", found, records)

    first, second = line({"e": 1}, 1.0, 90.0), line({"e": 2}, 2.0, None)
    assert row(first, second, accountants=["rdp", "rdp"]) == "| id | A | 1; 2, rdp | 96.00; 97.00 % | 1 | 90.00; - |"
    assert row(first, second, accountants=["rdp", "pld"]) == "| id | A | 1 rdp; 2 pld | 96.00; 97.00 % | 1 | 90.00; - |"
    assert row(second, accountants=["pld"]) == "| id | A | 2, pld | 97.00 % | 1 |  |"
    assert row(line({}, None, 99.0), accountants=["pld"]) == "| id | A | not private | 95.00 % | 1 | 99.00 |"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('model = "linear"', ""),
        ("[grid]", "[grid]\ntemperature = [1]"),
        ('clipping = "dc-e"', 'clipping = "dc-f"'),
        ("[[rows]]", "[[rowz]]"),
        ('clipping = "dc-e"', '"clipping.percentile" = 0.5, clipping = "dc-e"'),
    ],
)
def test_a_configuration_with_a_mistake_is_refused(change: str, words: str) -> None:
    text = SMALL.replace(change, words or 'modle = "linear"')
    with pytest.raises(CliplessError):
        parse("broken", text)


def test_the_command_runs_an_experiment_from_its_name(
    small: Configuration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipless.app.reproduce.configuration.configurations", lambda: {"small": small})
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["reproduce", "small", "--quick", "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["page"] == "runs/reproduce/small-quick/table.md"
    assert len(list((tmp_path / "runs/reproduce/small-quick/runs").iterdir())) == 1
    listed = json.loads(CliRunner().invoke(app, ["reproduce", "--list", "--json"]).stdout)
    assert listed["small"].startswith("no paper: Digits")


OWN = """
data = "digits"
measure = ["norms"]

[settings]
model = "linear"
epochs = 1
batch_size = 300
epsilon = 4.0

[grid]
lr = [0.1, 0.5]
clipping.threshold = [0.5, 1.0]

[[rows]]
name = "Abadi"
settings = { clipping = "abadi" }

[figure]
kind = "heat"
x = "lr"
y = "clipping.threshold"
"""


def test_the_command_runs_a_users_own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heat map, norms and E(C) of one's own grid, in a folder and a store of the file's name, marked as research."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.toml").write_text(OWN)
    done = CliRunner().invoke(app, ["reproduce", "configs/mine.toml", "--store", "kept", "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["id"] == "mine"
    assert record["page"] == "runs/reproduce/mine/table.md"
    assert {Path(figure["file"]).stem for figure in record["figures"]} == {
        f"mine-{name}" for name in ("heat", "shares", "norms", "errors")
    }
    page = Path(record["page"]).read_text(encoding="utf-8")
    assert "RESEARCH: this experiment looks at single training records" in page
    assert len(json.loads((tmp_path / "kept" / "mine.json").read_text())["runs"]) == 4
    monkeypatch.setattr(running, "train", lambda *_, **__: pytest.fail("trained"))
    again = CliRunner().invoke(app, ["reproduce", "configs/mine.toml", "--out", "other", "--store", "kept", "--json"])
    assert again.exit_code == 0, again.output


def test_a_configuration_that_is_not_there_or_wrong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="an id of --list"):
        reproduction(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text(OWN.replace('data = "digits"', ""))
    with pytest.raises(InvalidArgument, match="bad cannot be read.*data"):
        reproduction(str(tmp_path / "bad.toml"))
    with pytest.raises(InvalidArgument, match="auto-fashion"):
        reproduction("auto-fashoin")


def test_shares_are_those_of_every_row_that_was_looked_at(small: Configuration) -> None:
    looks = [
        {"step": at, "above": above, "quantiles": [0.1, 0.2, 0.3, 0.4, 0.5]} for at, above in ((0, 1.0), (9, 0.25))
    ]
    records = [fake(f"row {number}", 0.5, extra={"norms": looks}) for number in range(5)]
    left, right = PICTURES["shares"](small, [], records).axes
    assert [line.get_label() for line in left.lines] == [f"row {number}" for number in range(5)]
    assert left.lines[0].get_ydata().tolist() == [100.0, 25.0]
    assert right.lines[0].get_ydata().tolist() == [0.3, 0.3]


def test_a_missing_data_set_is_refused_before_anything_is_trained(
    small: Configuration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipless.app.data.sources.SYSTEM_FOLDERS", ())
    with pytest.raises(InvalidArgument, match="apt-get install dataset-fashion-mnist"):
        running.run_grid(replace(small, data="fashion-mnist"), tmp_path, lambda *_: None, data_dir=str(tmp_path))
    assert not list(tmp_path.iterdir())


def fake(row: str, score: float, **changes: Any) -> dict[str, Any]:
    return {
        "row": row, "point": {}, "metric": "squared_error", "score": score, "epsilon": None, "epsilons": None, "plan": None,
        "thresholds": None, "settings": {"seed": 0}, "extra": {},
    } | changes  # fmt: skip


def test_errors_are_not_shown_in_percent(small: Configuration) -> None:
    table = markdown(lines(small, [fake("plain", 0.5), fake("plain", 0.7)]))
    assert "squared error, ours" in table
    assert "0.6000 (0.5000, 0.7000)" in table


def test_fewer_than_five_seeds_have_no_interval_anywhere(small: Configuration) -> None:
    scores = [0.5, 0.6, 0.7, 0.9]
    records = [
        fake("plain", score, metric="accuracy", settings={"seed": seed}, extra={"ECE": score})
        for seed, score in enumerate(scores)
    ]
    fifth = fake("plain", 0.8, metric="accuracy", settings={"seed": 4}, extra={"ECE": 0.8})
    few, enough = (markdown(lines(small, found)) for found in (records, [*records, fifth]))
    assert "±" not in few
    assert "67.50 (50.00, 60.00, 70.00, 90.00)" in few
    assert "70.00 ± 19.63" in enough
    assert "0.7000 ± 0.1963" in enough


PAIRED = """
title = "Pairs"
source = "ours"
data = "digits"
seeds = 2
pairs = [["A", "B"]]

[settings]
model = "linear"

[grid]
accountant = ["rdp", "pld"]

[[rows]]
name = "A"
settings = { clipping = "auto-s" }

[[rows]]
name = "B"
settings = { clipping = "abadi", accountant = "rdp" }
"""


def test_differences_are_paired_by_seed_and_by_the_settings_of_the_grid() -> None:
    """B has the accountant by itself: it is compared with A's runs of that accountant, and of the seeds that both have."""
    paired = parse("paired", PAIRED)

    def run(row: str, accountant: str, seed: int, score: float) -> dict[str, Any]:
        point = {"accountant": accountant} if row == "A" else {}
        settings = {"accountant": accountant, "seed": seed}
        return fake(row, score, metric="accuracy", point=point, settings=settings)

    records = [run("A", "rdp", 0, 0.90), run("A", "rdp", 1, 0.80), run("A", "pld", 0, 0.99), run("A", "rdp", 2, 0.1)]
    records += [run("B", "rdp", 1, 0.70), run("B", "rdp", 0, 0.95)]
    (found,) = differences(paired, records)
    assert found.point == {"accountant": "rdp"}
    assert found.values == pytest.approx((-5.0, 10.0))
    table = differences_table([found], "accuracy")
    assert "| A minus B | rdp | +2.50 (-5.00, +10.00) | 1 of 2 | 2 |" in table
    assert differences_table([], "accuracy") == ""
    many = [run(row, "rdp", seed, 0.5 + 0.01 * seed * (row == "A")) for row in "AB" for seed in range(5)]
    assert differences(paired, many)[0].text == "+2.00 ± 1.96"
    with pytest.raises(InvalidArgument, match="C"):
        parse("paired", PAIRED.replace('["A", "B"]', '["A", "C"]'))


def test_an_interrupted_run_of_a_long_experiment_goes_on(
    small: Configuration, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's checkpoint is found: the steps before it are not taken again."""
    cell = replace(small.cells()[0], settings=replace(small.cells()[0].settings, epochs=3))
    steps: list[int] = []
    digits = load("digits")
    place = Saving(running.unfinished(tmp_path, cell), resume=True)
    with pytest.raises(Interrupted):
        train(digits, cell.settings, lambda at: steps.append(at.step), place, stop=lambda: len(steps) >= 7, group=False)
    monkeypatch.setattr(
        running, "train", lambda *args, **kwargs: train(*args, on_progress=lambda at: steps.append(at.step), **kwargs)
    )
    running.run_cell(cell, None, str(tmp_path), resume=True)
    record = running.stored(tmp_path, cell)
    assert record is not None
    assert steps.count(2) == 1
    assert max(steps) == record["steps"] == 15
    assert record["score"] == train(digits, cell.settings, group=False).score


def test_what_is_stored_is_shown_without_training(
    small: Configuration, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipless.app.reproduce.configuration.configurations", lambda: {"small": small})
    monkeypatch.setattr(running, "train", lambda *_, **__: pytest.fail("trained"))
    first = (folder / running.RUNS / f"{small.cells()[0].stem}.json").read_text()
    (tmp_path / running.RUNS).mkdir()
    (tmp_path / running.RUNS / f"{small.cells()[0].stem}.json").write_text(first)
    asked = ["reproduce", "small", "--stored", "--out", str(tmp_path), "--store", str(tmp_path / "kept"), "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "kept" / "small.json").read_text())["missing_runs"] == 7


def test_kept_results_are_not_run_again_and_not_lost(
    small: Configuration, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed of one row is asked for: it is run, and the store has it beside all that it had."""
    monkeypatch.setattr("clipless.app.reproduce.configuration.configurations", lambda: {"small": small})
    kept = experiment.results(small, running.finished(small, folder, small.cells()))
    missing = [run for run in kept["runs"] if run["row"] == "DC-E" and run["settings"]["seed"] == 0]
    kept["runs"] = [run for run in kept["runs"] if run["row"] != "DC-E"]
    store = tmp_path / "kept"
    running.write_record(store / "small.json", kept)
    trained: list[str] = []
    run_cell = running.run_cell
    monkeypatch.setattr(running, "run_cell", lambda cell, *args: (trained.append(cell.stem), run_cell(cell, *args)))
    asked = [
        "reproduce",
        "small",
        "--seeds",
        "1",
        "--row",
        "DC-E",
        "--out",
        str(tmp_path / "out"),
        "--store",
        str(store),
    ]
    done = CliRunner().invoke(app, [*asked, "--json"])
    assert done.exit_code == 0, done.output
    assert trained == [cell.stem for cell in small.cells(1) if cell.row == "DC-E"]
    now = json.loads((store / "small.json").read_text())
    key = ("row", "point", "score", "thresholds", "settings", "line")
    assert sorted(str([run[k] for k in key]) for run in now["runs"]) == sorted(
        str([run[k] for k in key]) for run in [*kept["runs"], *missing]
    )
    assert now["plans"] == kept["plans"]
    assert [now["machines"][run["machine"]] for run in now["runs"]] == [kept["machines"][0]] * 7
    assert CliRunner().invoke(app, [*asked, "--row", "DC-F"]).exit_code != 0


CHOSEN = """
title = "A threshold chosen privately"
source = "no paper"
data = "digits"
seeds = 2

[settings]
model = "linear"
epochs = 1
batch_size = 300
epsilon = 4.0
accountant = "rdp"

[[rows]]
name = "Abadi"
settings = { clipping = "abadi" }
choose = { method = "liu-talwar", try = { "clipping.threshold" = [0.1, 1, 10] } }

[quick]
seeds = 1
"""


def test_a_row_whose_setting_is_chosen_pays_for_the_choice(tmp_path: Path) -> None:
    chosen = parse("chosen", CHOSEN)
    records = running.run_grid(chosen, tmp_path, lambda *_: None)
    assert [one["candidate"]["clipping.threshold"] for one in records] == 2 * [0.1, 1, 10]
    (noise,) = {one["plan"]["noise_multiplier"] for one in records}
    plan, method = records[0]["plan"], LiuTalwar.covering(3)
    run = ((StepEvent(plan["sample_rate"], noise), plan["steps"]),)
    spent = method.epsilon([run] * 3, records[0]["delta"], "rdp")
    assert 3.9 < spent <= 4.0  # of the choice; a single run has about a third
    assert all(one["epsilons"]["rdp"] < 2 for one in records)
    (line,) = lines(chosen, records)
    assert line.epsilon == 4.0
    assert line.epsilons == {}
    assert len(line.scores) == 2
    for seed, score in enumerate(line.scores):
        own = [100 * one["score"] for one in records if one["settings"]["seed"] == seed]
        rng = random.Random(seed)
        drawn = [max(rng.choices(own, k=_geometric(rng, method.stop_probability))) for _ in range(4000)]
        # Five standard errors of 4,000 draws: a false alarm in two million.
        assert abs(score - fmean(drawn)) <= 5 * stdev(drawn) / 4000**0.5 + 1e-9


def test_the_time_of_a_choice_is_that_of_all_its_candidates(tmp_path: Path) -> None:
    timed = parse("chosen", CHOSEN.replace("seeds = 2", 'seeds = 2\nmeasure = ["time"]', 1))
    records = running.run_grid(timed, tmp_path, lambda *_: None, seeds=1)
    (line,) = lines(timed, records)
    minutes = [one["extra"]["CPU minutes"] for one in records]
    assert len(minutes) == 3
    assert min(minutes) > 0
    assert line.extra["CPU minutes"] == (pytest.approx(sum(minutes)),)
    assert "| CPU minutes |" in markdown([line]).splitlines()[0]
    del records[1]["extra"]["CPU minutes"]  # a run of before it was measured
    assert lines(timed, records)[0].extra == {}


def test_a_choice_of_which_some_candidates_have_not_been_run_has_no_line(tmp_path: Path) -> None:
    """The best of some would pass for the best of all."""
    chosen = parse("chosen", CHOSEN)
    records = running.run_grid(chosen, tmp_path, lambda *_: None)
    (line,) = lines(chosen, records[:-1])
    assert line.scores == lines(chosen, records)[0].scores[:1]
    assert lines(chosen, records[:2]) == []
    stored = running.finished(chosen, tmp_path, chosen.cells(2))
    assert len(stored) == 6
    for path in sorted((tmp_path / "runs").iterdir())[:2] + sorted((tmp_path / "runs").iterdir())[-2:]:
        path.unlink()
    with pytest.raises(InvalidArgument, match="all its candidates"):
        experiment.written(chosen, tmp_path, "png")


def _geometric(rng: random.Random, stop: float) -> int:
    count = 1
    while rng.random() >= stop:
        count += 1
    return count


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"clipping.threshold" = [0.1, 1, 10]', '"batch_size" = [100, 200]'), "differ in steps"),
        (("try =", "priced_as = 6, try ="), "takes method and try alone"),
        (('"liu-talwar"', '"guessing"'), "guessing"),
    ],
)
def test_a_choice_that_cannot_be_priced_is_refused(change: tuple[str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse("chosen", CHOSEN.replace(*change))


def test_the_best_of_all_candidates_is_what_a_whole_grid_releases() -> None:
    choice = read_choice({"method": "grid", "try": {"lr": [0.1, 0.2, 0.3]}})
    assert choice is not None
    assert choice.expected_score([0.5, 0.9, 0.7]) == 0.9


def test_the_noise_cost_is_that_of_the_gradient_alone() -> None:
    plan = {"noise_multiplier": 2.4, "statistic_multiplier": 4.0, "dimensions": [30, 20], "expected_batch": 10}
    assert running.noise_cost(plan) == pytest.approx(9 * 50 / 100)  # 1/2.4^2 = 1/3^2 + 1/4^2
    assert running.noise_cost(plan | {"statistic_multiplier": None}) == pytest.approx(2.4**2 * 50 / 100)


def test_a_row_may_have_data_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored run counts for its own data only."""
    own = SMALL.replace('name = "AUTO-S"', 'name = "AUTO-S"\ndata = "digits+halved"')
    with_own = parse("small", own).cells(1)
    assert [cell.data for cell in with_own if cell.row == "AUTO-S"] == ["digits+halved"] * 2
    assert {cell.data for cell in with_own if cell.row != "AUTO-S"} == {"digits"}
    monkeypatch.setenv("CLIPLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(FEATURES, "halved", Feature(lambda images: images / 2, 500, ""))
    running.run_cell(with_own[0], None, str(tmp_path), resume=False)
    record = running.stored(tmp_path, with_own[0])
    assert record is not None
    assert record["data"] == "digits+halved"
    assert running.stored(tmp_path, replace(with_own[0], data="digits")) is None
