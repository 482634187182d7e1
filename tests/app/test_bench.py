"""The benchmark: its arithmetic, its order, its ways, and what it writes. No test looks at how long anything took."""

import json
import math
import platform
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

import children
import clipless
from clipless.app.bench import arithmetic, chart, machine, memory, opacus_ways, readme, results, scaling, store, ways
from clipless.app.bench.memory import Memory
from clipless.app.bench.problems import PROBLEMS, TINY_PROBLEMS, Problem
from clipless.app.bench.results import FAILED, UNSUPPORTED, BenchResult, ModelResult, WayResult
from clipless.app.bench.run import BenchSettings, groups, rounds_of, start
from clipless.app.bench.scaling import AXES, Curve
from clipless.app.bench.timing import interleave, order
from clipless.app.bench.ways import CLIPLESS, PLAIN, WAYS, Runner
from clipless.app.bench.work import Pilot
from clipless.app.cli import app
from clipless.errors import InvalidArgument

ROOT = Path(__file__).parents[2]
needs_opacus = pytest.mark.skipif(not opacus_ways.installed(), reason="Opacus is not installed")
needs_charts = pytest.mark.skipif(not chart.installed(), reason="matplotlib is not installed")


def made_up(**changes: object) -> BenchResult:
    """A result as it could be stored, with every kind of entry."""
    plain = WayResult(ms=(10.0, 12.0, 10.5), plain_ms=(10.0, 12.0, 10.5), memory=Memory(100.0, 110.0, 200.0, True))
    auto_s = WayResult(ms=(12.0, 13.2, 12.6), plain_ms=plain.ms, draw_ms=0.5, memory=Memory(100.0, 120.0, 250.0, True))
    slow = WayResult(ms=(90.0,), plain_ms=(10.0,), capped=True, note="LSTM replaced by Opacus's own")
    refused = WayResult(UNSUPPORTED, "NotImplementedError: tied")
    found = {PLAIN: plain, "auto-s": auto_s, "opacus-hooks": slow, "opacus-ghost": refused}
    other = found | {"auto-s": replace(auto_s, ms=(30.0, 36.0, 31.5))}
    result = BenchResult(
        date="2026-01-02T03:04:05+00:00",
        machine={
            "cpu": "Some CPU",
            "usable_cores": 2,
            "threads": 2,
            "versions": {"torch": "2.13.0"},
            "load_average_before": 0.1,
        },
        settings={"rounds": 3, "tiny": False},
        models={
            "mlp": ModelResult("MLP", 512, 1000, 1000, 0.1, found),
            "decoder": ModelResult("decoder", 8, 2000, 1500, 0.1, other),
        },
        scaling={"batch": Curve("batch", (1, 2, 4), (1.0, 2.0, 4.0), (3.0, 12.0, 48.0))},
        complete=True,
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def stored(result: BenchResult, folder: Path) -> Path:
    results.save(result, folder / "bench.json")
    return folder / "bench.json"


# Arithmetic.


def test_ratios_of_made_up_times() -> None:
    ours, plain = [30.0, 12.0, 16.0], [10.0, 8.0, 10.0]
    assert arithmetic.ratio_of_minima(ours, plain) == 1.5
    assert arithmetic.median_of_ratios(ours, plain) == 1.6
    assert arithmetic.spread(plain) == 1.25
    assert arithmetic.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


@given(
    exponent=st.floats(-3, 3),
    scale=st.floats(1e-3, 1e3),
    sizes=st.lists(st.integers(1, 10_000), min_size=2, max_size=8, unique=True),
)
def test_slope_of_a_power_law_is_its_exponent(exponent: float, scale: float, sizes: list[int]) -> None:
    times = [scale * size**exponent for size in sizes]
    assert arithmetic.slope(sizes, times) == pytest.approx(exponent, abs=1e-6)


def test_a_round_that_is_slow_for_all_leaves_the_median_of_ratios_alone() -> None:
    calm = arithmetic.median_of_ratios([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert arithmetic.median_of_ratios([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == calm


# Order.


@pytest.mark.parametrize("number", range(1, 9))
def test_everyone_has_every_place_and_follows_everyone_equally_often(number: int) -> None:
    cycle = number if number % 2 == 0 else 2 * number
    turns = [order(number, round_number) for round_number in range(cycle)]
    assert all(sorted(turn) == list(range(number)) for turn in turns)
    for place in range(number):
        assert set(Counter(turn[place] for turn in turns).values()) == {cycle // number}
    follows = Counter(pair for turn in turns for pair in pairwise(turn))
    assert len(follows) == number * (number - 1)
    assert len(set(follows.values())) <= 1


def recorder(name: str, log: list[str]) -> Runner:
    nothing = torch.zeros(0)

    def draw() -> tuple[Tensor, Tensor]:
        log.append(f"draw {name}")
        return nothing, nothing

    return Runner(draw, lambda x, y: log.append(name), lambda: None)


def test_ways_are_interleaved_and_each_step_has_its_batch() -> None:
    names, log, ticks = [PLAIN, "a", "b"], [], []
    series = interleave({name: recorder(name, log) for name in names}, rounds=4, tick=ticks.append)
    expected = [names[place] for number in range(4) for place in order(3, number)]
    assert log == [line for name in expected for line in (f"draw {name}", name)]
    assert ticks == expected
    assert all(list(each.step_ms) == [0, 1, 2, 3] for each in series.values())


def test_a_way_over_its_budget_stops_after_three_rounds_and_plain_goes_on() -> None:
    log: list[str] = []
    series = interleave({name: recorder(name, log) for name in (PLAIN, "slow")}, rounds=6, budget=0.0)
    assert list(series["slow"].step_ms) == [0, 1, 2]
    assert list(series[PLAIN].step_ms) == [0, 1, 2, 3, 4, 5]


def test_large_models_are_held_few_at_a_time_and_nobody_is_lost() -> None:
    names = [str(number) for number in range(11)]
    for parameters in (1, 26_010, 22_417_922, 10**12):
        parts = groups(names, parameters)
        assert [name for part in parts for name in part] == names
        assert all(len(part) <= 4 for part in parts) or parameters < 10**7


# Ways.


def test_the_models_are_those_that_are_promised() -> None:
    names = ["mlp", "cnn", "resnet18", "encoder", "lstm", "decoder", "lora", "tabular"]
    assert list(PROBLEMS) == list(TINY_PROBLEMS) == names
    assert [PROBLEMS[name].batch for name in PROBLEMS] == [512, 512, 32, 16, 256, 8, 16, 256]
    model, x, _ = PROBLEMS["tabular"].make()
    assert x.shape == (256, 32)
    assert [tuple(p.shape) for p in model.parameters()] == [(64, 32), (64,), (64, 64), (64,), (2, 64), (2,)]


@pytest.mark.parametrize("way", [PLAIN, "auto-s"])
def test_every_model_has_its_own_optimizer(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped: list[str] = []
    for kind in (torch.optim.SGD, torch.optim.Adam):
        step = kind.step
        monkeypatch.setattr(
            kind, "step", lambda *args, step=step, kind=kind: stepped.append(kind.__name__) or step(*args)
        )
    for name in ("mlp", "tabular"):
        runner = WAYS[way](TINY_PROBLEMS[name])
        runner.step(*runner.draw())
        runner.close()
    assert stepped == ["SGD", "Adam"]


@pytest.mark.parametrize(
    ("way", "name"),
    sorted(
        {*((way, "mlp") for way in CLIPLESS), *((way, name) for name in TINY_PROBLEMS for way in (PLAIN, "auto-s"))}
    ),
)
def test_every_way_and_every_model_trains_on_the_whole_batch(way: str, name: str) -> None:
    problem = TINY_PROBLEMS[name]
    runner = WAYS[way](problem)
    try:
        for _ in range(2):
            x, y = runner.draw()
            assert len(x) == len(y) == problem.batch
            runner.step(x, y)
    finally:
        runner.close()


def test_every_clipping_is_in_the_benchmark() -> None:
    assert set(CLIPLESS) == {*clipless.clipping.CLIPPINGS, ways.PER_LAYER}
    assert ways.chosen("all", with_opacus=False) == tuple(CLIPLESS)


@needs_opacus
@pytest.mark.parametrize("mode", opacus_ways.MODES)
@pytest.mark.parametrize("problem", TINY_PROBLEMS.values(), ids=TINY_PROBLEMS)
def test_opacus_does_the_same_work(problem: Problem, mode: str) -> None:
    """Without noise, and with the batch as learning rate, its step is minus the sum of gradients clipped at 1."""
    model, x, y = problem.make()
    truth, _, _ = problem.make()
    fixed: list[nn.Module] = []

    def optimizer_of(ready: nn.Module) -> torch.optim.Optimizer:
        fixed.append(ready)
        return torch.optim.SGD([p for p in ready.parameters() if p.requires_grad], lr=len(x))

    if (problem.name, mode) == ("decoder", "ghost"):
        refused = start("opacus-ghost", problem)
        assert isinstance(refused, WayResult)
        assert refused.status == UNSUPPORTED
        assert "tying" in refused.reason
        return
    take, note = opacus_ways.step(problem, model, optimizer_of, len(x), mode, noise_multiplier=0.0)
    with opacus_ways.quiet():
        take(x, y)
    assert (note is not None) == (problem.name == "lstm")

    def losses(each: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        pairs = zip(each(batch[0]), batch[1], strict=True)
        return torch.stack([problem.loss(logits[None], target[None]) for logits, target in pairs])

    clipped = clipless.clipped_sum(truth, losses, (x, y), clipping="abadi").grads
    after = dict(fixed[0].named_parameters())
    trainable = {name: before for name, before in truth.named_parameters() if before.requires_grad}
    for name, before in trainable.items():
        assert torch.allclose(before - after[name], clipped[name], atol=1e-5, rtol=1e-3), name
    assert sum(clipped[name].square().sum() for name in trainable) > 0.1


def test_a_way_that_refuses_a_model_is_told_and_does_not_end_the_run() -> None:
    mixing = replace(TINY_PROBLEMS["mlp"], build=lambda: nn.Sequential(nn.Linear(784, 10), nn.BatchNorm1d(10)))
    found = start("auto-s", mixing)
    assert isinstance(found, WayResult)
    assert found.status == FAILED
    assert "BatchNorm1d" in found.reason


def test_accumulated_parts_make_the_step_of_the_whole_batch() -> None:
    problem = TINY_PROBLEMS["mlp"]
    whole, x, y = problem.make()
    parted, _, _ = problem.make()
    scaling.accumulate(problem, whole, torch.optim.SGD(whole.parameters(), 1.0), iter([(x, y, 1.0)]))
    parts = ((a, b, len(a) / len(x)) for a, b in zip(x.split(5), y.split(5), strict=True))
    scaling.accumulate(problem, parted, torch.optim.SGD(parted.parameters(), 1.0), parts)
    before, _, _ = problem.make()
    for one, other, start_value in zip(whole.parameters(), parted.parameters(), before.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
        assert not torch.equal(one, start_value)


def test_micro_batches_are_stepped_privately_and_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step changes the weights of its own model, by parts that are as large as asked for and no larger."""
    models: list[nn.Module] = []
    sizes: list[int] = []
    problem, loss = TINY_PROBLEMS["mlp"], Problem.loss

    def built() -> nn.Module:
        models.append(problem.build())
        return models[-1]

    def watched(self: Problem, logits: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(logits))
        return loss(self, logits, targets)

    monkeypatch.setattr(Problem, "loss", watched)
    runners = scaling.accumulated(replace(problem, build=built), part=5)
    assert list(runners) == [PLAIN, scaling.PRIVATE]
    for model, runner in zip(models, runners.values(), strict=True):
        for _ in range(2):
            sizes.clear()
            before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            runner.step(*runner.draw())
            assert not torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), before)
            assert len(sizes) > 1
            assert max(sizes) == 5
        runner.close()


# Memory.


def test_memory_is_measured_in_a_process_and_grows_with_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "subprocess", children.InsteadOfSubprocess(tmp_path))
    small, large = memory.measure("mlp", PLAIN, tiny=True), memory.measure("mlp", PLAIN)
    assert isinstance(small, Memory)
    assert isinstance(large, Memory)
    assert 0 < small.imported_mb < small.peak_mb
    more = sum(p.numel() for p in PROBLEMS["mlp"].build().parameters()) * 4 / 1e6
    assert large.above_import_mb > small.above_import_mb + more  # the weights are once more in the gradients


def test_a_process_that_fails_tells_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "subprocess", children.InsteadOfSubprocess(tmp_path))
    assert "KeyError" in str(memory.measure("mlp", "no such way", tiny=True))


# Results.


def test_a_result_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    assert results.load(stored(made_up(), tmp_path)) == made_up()


def test_figures_come_from_the_raw_values(tmp_path: Path) -> None:
    record = json.loads(stored(made_up(), tmp_path).read_text())
    figures = record["models"]["mlp"]["ways"]["auto-s"]["figures"]
    assert figures["ratio_of_minima"] == 1.2
    assert figures["median_of_ratios"] == 1.2
    assert figures["peak_over_plain"] == 1.25
    assert figures["peak_above_import_over_plain"] == 1.5
    assert record["geometric_means"]["auto-s"]["ratio_of_minima"] == round(math.sqrt(1.2 * 3.0), 4)
    assert record["geometric_means"]["auto-s"]["models"] == 2
    assert "opacus-ghost" not in record["geometric_means"]
    assert record["scaling"]["batch"]["slope_ratio"] == pytest.approx(2.0)


def test_a_busy_machine_and_an_unfinished_run_are_warned_of() -> None:
    assert made_up().warnings() == []
    assert "not finished" in made_up(complete=False).warnings()[0]
    assert "load average was 2.5" in made_up(machine={**made_up().machine, "load_average_before": 2.5}).warnings()[0]
    model = made_up().models["mlp"]
    busy = replace(model, ways={PLAIN: WayResult(ms=(10.0, 13.0, 14.0), plain_ms=(10.0, 13.0, 14.0))})
    assert "1.30 times its minimum" in made_up(models={"mlp": busy}).warnings()[0]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"kind": "clipless bench"}', '{"kind": "other"}'])
def test_a_foreign_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(InvalidArgument, match="not a result of clipless bench"):
        results.load(tmp_path / "bench.json")


# The README's table.


def test_the_block_of_a_page_is_rewritten_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    first, last = readme.EVERY_MODEL
    both = f"{readme.START}\nold\n{readme.END}\nbetween\n{first}\nold\n{last}"
    page.write_text(f"# Title\n\nbefore\n{both}\nafter ε\n", encoding="utf-8")
    readme.write([made_up()], page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Title\n\nbefore\n{readme.START}\n| machine |")
    assert f"{readme.END}\nbetween\n{first}\nSome CPU, 2 cores:\n" in text
    assert text.endswith(f"{last}\nafter ε\n")
    assert "old" not in text
    assert "| MLP | 512 | 10 ms | x1.20 | x9.00 | unsupported | x1.25 |" in text
    assert "**x1.90**" in text
    assert "Some CPU, 2 cores, 2 threads, torch 2.13.0, 2026-01-02" in text
    readme.write([made_up()], page)
    assert page.read_text(encoding="utf-8") == text


def test_a_page_without_a_place_is_refused_and_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("no markers")
    with pytest.raises(InvalidArgument, match="end of speed"):
        readme.write([made_up()], page)
    assert page.read_text() == "no markers"


def test_how_the_allocator_was_set_is_told_with_the_numbers() -> None:
    assert "MALLOC" not in readme.where(made_up())
    told = made_up(machine={**made_up().machine, "allocator": {"MALLOC_TRIM_THRESHOLD_": "8"}})
    assert "torch 2.13.0, MALLOC_TRIM_THRESHOLD_=8, 2026-01-02" in readme.where(told)


@pytest.mark.parametrize(
    ("step_ms", "tiny", "rounds"), [(40.0, False, 50), (0.8, False, 400), (1000.0, False, 6), (40.0, True, 6)]
)
def test_short_steps_are_timed_more_often(step_ms: float, tiny: bool, rounds: int) -> None:
    settings = BenchSettings(models=("mlp",), ways=(), rounds=6, tiny=tiny)
    assert rounds_of(settings, Pilot(parameters=1, trainable=1, step_ms=step_ms)) == rounds


@pytest.mark.parametrize("changes", [{"complete": False}, {"settings": {"rounds": 3, "tiny": True}}], ids=str)
def test_numbers_that_mean_nothing_are_not_quoted(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="measure again"):
        readme.block([made_up(), made_up(**changes)])
    with pytest.raises(InvalidArgument, match="measure again"):
        readme.every_model([made_up(), made_up(**changes)])


# The command.


@needs_charts
def test_a_stored_result_is_shown_and_drawn_again(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"{readme.START}\n{readme.END}\n")
    path = stored(made_up(), tmp_path)
    done = CliRunner().invoke(app, ["bench", "--from", str(path), "--readme", str(page)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for text in (
        "Peak memory",
        "1.20",
        "9.00",
        "unsupported",
        "tied",
        "stopped after 1 rounds",
        "2 of 2",
        "2.00",
        "Some CPU",
    ):
        assert text in done.stdout
    assert "**x1.90**" in page.read_text()
    svg = (tmp_path / "bench.svg").read_text()
    assert "<svg" in svg
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "scaling.svg").is_file()
    chart.draw(made_up(), tmp_path)
    assert (tmp_path / "bench.svg").read_text() == svg


def test_a_way_that_failed_makes_the_exit_code_1(tmp_path: Path) -> None:
    model = made_up().models["mlp"]
    broken = replace(model, ways={**model.ways, "dc-e": WayResult(FAILED, "Misuse: broken")})
    path = stored(made_up(models={"mlp": broken}), tmp_path)
    done = CliRunner().invoke(app, ["bench", "--from", str(path)], catch_exceptions=False)
    assert done.exit_code == 1
    assert "Misuse: broken" in done.output


@pytest.mark.scripts
def test_quick_run_from_end_to_end(tmp_path: Path) -> None:
    options = ["--quick", "--models", "mlp,lstm", "--clippings", "auto-s", "--no-opacus", "--threads", "1", "--json"]
    command = ["bench", *options, "--scaling", "batch,records", "--no-memory", "--out", "here", "--malloc", "on"]
    other = {"MALLOC_TRIM_THRESHOLD_": "1000000", "MALLOC_ARENA_MAX": "1"}
    done = children.run("clipless.app.cli", *command, cwd=tmp_path, environment=other)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    folder = tmp_path / "here" / machine.slug(record["machine"])
    assert record == json.loads((folder / "bench-malloc.json").read_text())
    assert record["machine"]["allocator"] == store.MALLOC
    assert record["complete"]
    assert list(record["models"]) == ["mlp", "lstm"]
    for model in record["models"].values():
        assert list(model["ways"]) == [PLAIN, "auto-s"]
        assert len(model["ways"]["auto-s"]["ms"]) == 3
        assert model["ways"]["auto-s"]["figures"]["ratio_of_minima"] > 0
    assert list(record["scaling"]) == ["batch", "records"]
    assert all(len(curve[way]) == 3 for curve in record["scaling"].values() for way in ("plain_ms", "private_ms"))
    assert all(ms > 0 for curve in record["scaling"].values() for ms in (*curve["plain_ms"], *curve["private_ms"]))
    assert record["scaling"]["records"]["sizes"] == [10**4, 10**6, 10**8]
    assert {"cpu", "cores", "threads", "versions", "load_average_before"} <= record["machine"].keys()
    assert platform.node() not in done.stdout
    assert str(tmp_path) not in done.stdout


def test_quick_run_with_memory_shows_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With figures made up: that they are measured in processes of their own is tested above."""
    measured: list[str] = []

    def measure(problem: str, way: str, **how: object) -> Memory:
        measured.append(way)
        return Memory(100.0, 110.0, 200.0 + 100.0 * len(measured), True)

    monkeypatch.setattr(memory, "measure", measure)
    options = ["--quick", "--models", "mlp", "--clippings", "auto-s", "--no-opacus", "--threads", "1"]
    done = CliRunner().invoke(
        app, ["bench", *options, "--scaling", "none", "--out", str(tmp_path)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    assert "Peak memory" in done.stdout
    assert measured == [PLAIN, "auto-s"]
    found = results.load(tmp_path / machine.slug(machine.facts()) / "bench.json").models["mlp"]
    assert found.ways["auto-s"].figures(found.plain)["peak_over_plain"] == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "mpl"], "did you mean 'mlp'"),
        (["--models", ","], "no model"),
        (["--clippings", "auto-x"], "did you mean"),
        (["--scaling", "dept"], "unknown scaling axis"),
        (["--scaling", "non"], "did you mean 'none'"),
        (["--models", "al"], "did you mean 'all'"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--threads", "0"], "threads must be at least 1"),
        (["--seconds-per-way", "0"], "positive"),
        (["--from", "nowhere.json"], "not a result of clipless bench"),
        (["--from", "."], "holds no result of clipless bench"),
        (["--malloc", "of"], "did you mean 'off'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=message):
        CliRunner().invoke(app, ["bench", "--out", str(tmp_path), *arguments], catch_exceptions=False)


def test_curves_have_a_time_for_every_size() -> None:
    settings = BenchSettings(models=("mlp",), ways=(), axes=tuple(AXES)).checked()
    for name in settings.axes:
        ticks: list[str] = []
        found = scaling.curve(AXES[name], rounds=1, tiny=True, tick=ticks.append)
        assert len(found.sizes) == len(found.plain_ms) == len(found.private_ms) == 3
        assert len(ticks) == scaling.steps([name], rounds=1, tiny=True)
    assert AXES["batch"].sizes == (8, 16, 32, 64, 128, 256, 512, 1024)


@pytest.mark.scripts
def test_full_training_private_against_plain(tmp_path: Path) -> None:
    options = ["--data", "digits", "--epochs", "1", "--batch-size", "512", "--threads", "1", "--out", "found.json"]
    done = children.run(ROOT / "benchmarks" / "fashion.py", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert 0 < found["epsilon"] <= 3.0
    assert set(found["runs"]) == {"private", "plain", "plain-indexed"}
    for name, run in found["runs"].items():
        assert run["total_seconds"] == pytest.approx(sum(run["seconds"].values()), abs=0.01)
        if name != "private":
            ratio = found["runs"]["private"]["total_seconds"] / run["total_seconds"]
            assert found["private_over"][name]["total"] == pytest.approx(ratio, rel=0.05)
