"""Gains of compiled functions, first steps and growing data sets, on tiny models: that the switch switches, and what is
written."""

import json
import runpy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from clipless.app.bench import compiled, made_up, scaling
from clipless.app.bench.compiled import POISSON, SWITCHES, Gain
from clipless.app.bench.first_steps import CHECKED, STEPS, first_steps
from clipless.app.bench.problems import PROBLEMS, TINY_PROBLEMS
from clipless.app.bench.timing import Series
from clipless.app.bench.ways import PLAIN, WAYS, Runner
from clipless.clipping import auto_s
from clipless.errors import InvalidArgument
from clipless.gradients import kernels
from clipless.gradients.checks.self_check import SelfCheck
from clipless.gradients.recurrent import matrix_products
from clipless.native import LIBRARY, conv, gram, layer_norm, library, lstm, rows
from clipless.native import noise as native_noise
from clipless.noise import adding, keys
from compiling import needs_library

ROOT = Path(__file__).parents[2]
ONEDNN = "torch's product by oneDNN"
# The functions of the library behind each switch.
SYMBOLS = {
    "release": {"clipless_release"},
    "keystream": {"clipless_keystream"},
    "squares": {"clipless_squares"},
    "norms": {"clipless_norms"},
    "add_rows": {"clipless_add_rows"},
    "norm_sums": {"clipless_norm_sums"},
    "conv_rows": {"clipless_conv_rows"},
    "add_products": {"clipless_add_products"},
    "write_products": {"clipless_write_products"},
    "ghost_norms": {"clipless_ghost_norms"},
    "lstm": {"clipless_lstm_forward", "clipless_lstm_back"},
    "onednn": {ONEDNN},
}
USERS = (native_noise, rows, layer_norm, conv, gram, lstm)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The calls of the library's functions, which are loaded anew for it and forgotten again."""
    calls: Counter[str] = Counter()
    plain = library.function

    def watched(path: Path, name: str, *arguments: type) -> Callable[..., None] | None:
        run = plain(path, name, *arguments)

        def called(*values: Any) -> None:
            calls[name] += 1
            run(*values)

        return None if run is None else called

    loaders = [
        adding.compiled,
        keys.compiled,
        rows.compiled,
        compiled.norm_sums.compiled,
        compiled.conv_rows.compiled,
        gram.compiled,
        compiled.compiled_lstm.compiled,
    ]

    def forget() -> None:
        for loader in loaders:
            loader.cache_clear()

    linear = matrix_products.onednn_linear

    def multiplied(*values: Any) -> torch.Tensor:
        calls[ONEDNN] += 1
        return linear(*values)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(matrix_products, "onednn_linear", multiplied))
        for user in USERS:
            stack.enter_context(mock.patch.object(user, "function", watched))
        stack.callback(forget)
        forget()
        for loader in loaders:
            loader()  # whose self-check calls them
        calls.clear()
        yield calls


def runner(model: str) -> Runner:
    if model != POISSON:
        return WAYS["auto-s"](TINY_PROBLEMS[model])
    return made_up.private_steps(TINY_PROBLEMS["tabular"], made_up.MadeUp(10_000, 8), auto_s())


def script(name: str, *arguments: str) -> Result:
    """Run a script of the benchmarks in this process, with as many threads as it has."""
    app = typer.Typer()
    app.command()(runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))["main"])
    return CliRunner().invoke(app, [*arguments, "--threads", str(torch.get_num_threads())], catch_exceptions=False)


@needs_library
@pytest.mark.parametrize(
    ("name", "model"), [(name, model) for name, switch in SWITCHES.items() for model in switch.models]
)
def test_the_switch_switches_this_function_off_and_no_other(
    name: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "ghost_norms":  # tiny models have few positions, and are written out
        monkeypatch.setattr(gram, "FEWEST", 2)
        monkeypatch.setattr(kernels, "_fastest", lambda methods, threads: methods[0][0])
    if name == "onednn":  # on every processor, and however small
        monkeypatch.setattr(matrix_products, "prefers_onednn", lambda _: True)
        monkeypatch.setattr(matrix_products, "WORTH_IT", 0)
    if name in ("add_products", "write_products"):
        method = "ghost" if name == "add_products" else "written"
        monkeypatch.setattr(
            kernels, "_fastest", lambda methods, _: method if method in dict(methods) else methods[0][0]
        )
    with counted() as calls:
        running = runner(model)
        for _ in range(4):  # the fourth checks itself, and the next one that does is the eighth
            running.step(*running.draw())
        calls.clear()
        running.step(*running.draw())
        before = Counter(calls)
        calls.clear()
        with SWITCHES[name].off():
            running.step(*running.draw())
        without = Counter(calls)
        calls.clear()
        running.step(*running.draw())
        running.close()
    every = set().union(*SYMBOLS.values())
    assert all(before[symbol] for symbol in SYMBOLS[name]), "this model does not use it: measure another"
    assert not any(without[symbol] for symbol in SYMBOLS[name])
    instead = {"clipless_write_products"} if name == "conv_rows" else set()
    assert {symbol for symbol in every if without[symbol]} - instead == {s for s in every if before[s]} - SYMBOLS[name]
    assert {symbol for symbol in every if calls[symbol]} == {symbol for symbol in every if before[symbol]}


def test_every_function_of_the_library_has_a_switch() -> None:
    sources = [path.read_text() for path in LIBRARY.parent.glob("*.py")]
    named = {word.strip('"f') for text in sources for word in text.replace("(", " ").replace(",", " ").split()}
    symbols = {word for word in named if word.startswith("clipless_")}
    others = {"clipless_normals", "clipless_sources"}  # the self-check's, and the digest of the sources
    assert symbols == set().union(*SYMBOLS.values()) - {ONEDNN} | others
    assert SYMBOLS.keys() == SWITCHES.keys()


def test_gains_come_back_and_the_best_model_is_in_the_table(tmp_path: Path) -> None:
    facts = {"cpu": "Some CPU", "usable_cores": 2, "tiny": False}
    gains = [
        Gain("release", "mlp", (10.0, 12.0), (15.0, 14.0)),
        Gain("release", "encoder", (10.0, 9.0), (10.0, 9.9)),
        Gain("lstm", "lstm", (10.0,), (10.1,)),
    ]
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "compiled.json").write_text(compiled.to_json(facts, gains))
    assert compiled.stored(tmp_path) == [(facts, gains)]
    table = compiled.table(compiled.stored(tmp_path))
    assert "| Some CPU, 2 cores |" in table
    assert "| mlp: x1.400 (10 ms, without 14) |" in table
    assert "| lstm: x1.010 (10 ms, without 10.1), not worth it |" in table
    assert "encoder" not in table


def test_the_page_shows_what_is_stored_of_every_function() -> None:
    table = compiled.table(found := compiled.stored(ROOT / "benchmarks" / "results"))
    assert f"{compiled.START}\n{table}{compiled.END}" in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert {gain.function for _, gains in found for gain in gains} == SWITCHES.keys()  # some on some processors only


def test_short_steps_are_repeated_and_long_ones_are_not() -> None:
    def rounds(*ms: float) -> int:
        return compiled._rounds_that_fill(8.0, [Series({0: 9999.0, 1: each}) for each in ms])

    assert [rounds(4.0, 6.0), rounds(0.1, 0.1), rounds(4000.0, 5000.0)] == [800, compiled.MOST_ROUNDS, 0]


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "clipless bench"}'])
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="not written by"):
        compiled.from_json(text)


@pytest.mark.scripts
def test_the_script_measures_and_writes_the_page(tmp_path: Path) -> None:
    options = ["--functions", "keystream,add_rows", "--rounds", "1", "--quick"]
    done = script("compiled", *options, "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*/compiled.json")
    _, gains = compiled.from_json(path.read_text())
    assert [(gain.function, gain.model) for gain in gains] == [
        (name, model) for name in ("keystream", "add_rows") for model in SWITCHES[name].models
    ]
    assert all(len(gain.with_ms) == len(gain.without_ms) == 1 for gain in gains)
    assert "add_rows on tabular: x" in done.stdout
    page = tmp_path / "page.md"
    page.write_text(f"{compiled.START}\nold\n{compiled.END}\n")
    with pytest.raises(InvalidArgument, match="full size"):
        script("compiled", "--from", str(tmp_path), "--page", str(page))
    path.write_text(path.read_text().replace('"tiny": true', '"tiny": false'))
    script("compiled", "--from", str(tmp_path), "--page", str(page))
    assert page.read_text() == f"{compiled.START}\n{compiled.table(compiled.stored(tmp_path))}{compiled.END}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--functions", "lstn"], "did you mean 'lstm'"),
        (["--functions", ","], "no function"),
        (["--from", "nowhere"], "no compiled.json"),
    ],
    ids=str,
)
def test_the_script_refuses(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        script("compiled", *arguments)


def test_the_first_steps_are_those_that_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    due: list[bool] = []
    ask = SelfCheck.due
    monkeypatch.setattr(SelfCheck, "due", lambda self, records: due.append(ask(self, records)) or due[-1])
    found = first_steps(TINY_PROBLEMS["tabular"], runs=1)
    assert due == 2 * [number in CHECKED for number in range(1, STEPS + 1)]
    assert len(found.private_ms) == STEPS
    assert found.over_plain(2) == found.private_ms[1] / found.plain_ms


def test_the_script_of_the_first_steps_writes_them_down(tmp_path: Path) -> None:
    done = script("first_steps", "--models", "mlp", "--runs", "1", "--quick", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*/first_steps.json")
    assert len(json.loads(path.read_text())["models"]["mlp"]["private_ms"]) == STEPS
    assert "step 1, checked" in done.stdout


# Data sets that are nowhere.


def test_made_up_records_are_the_same_one_by_one_and_together() -> None:
    data = made_up.MadeUp(10**8, features=5)
    numbers = [0, 7, 10**8 - 1]
    x, y = data.__getitems__(numbers)
    for row, number in enumerate(numbers):
        one, label = data[number]
        assert torch.equal(one, x[row])
        assert label == y[row]
    assert len(x.unique(dim=0)) == 3


@pytest.mark.parametrize("size", [10_000, 10**8])
def test_steps_on_made_up_records_draw_poisson_batches(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 batches of 16 records in the mean; false alarms below 1e-6."""
    problem, sizes = TINY_PROBLEMS["tabular"], []
    step = made_up.train_step
    monkeypatch.setattr(made_up, "train_step", lambda *args: sizes.append(len(args[3])) or step(*args))
    running = made_up.private_steps(problem, made_up.MadeUp(size, 8), auto_s())
    for _ in range(100):
        running.step(*running.draw())
    running.close()
    assert abs(sum(sizes) - 1600) < 200  # five standard deviations of the Poisson law
    assert len(set(sizes)) > 5


def test_growth_against_the_number_of_records_is_measured_up_to_1e8() -> None:
    axis = scaling.AXES["records"]
    assert axis.sizes == (10**4, 10**5, 10**6, 10**7, 10**8)
    assert PROBLEMS["tabular"].batch == 256
    runners = axis.runners(10**8)
    assert list(runners) == [PLAIN, scaling.PRIVATE]
    for running in runners.values():
        running.step(*running.draw())
        running.close()


def test_a_flat_curve_has_no_ratio_of_slopes() -> None:
    flat = scaling.Curve("n", (10**4, 10**8), (1.0, 1.0), (2.0, 2.5))
    assert flat.slope_ratio is None
    assert flat.private_slope == pytest.approx(0.0242, abs=1e-4)
    assert scaling.Curve("n", (1, 10), (1.0, 10.0), (1.0, 100.0)).slope_ratio == pytest.approx(2.0)
