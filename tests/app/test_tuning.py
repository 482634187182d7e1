"""The search: what is priced is what runs, what is recorded comes first, the best run is released and nothing else."""

import json
import math
import multiprocessing
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clipless.accounting import Ledger
from clipless.accounting.selection import METHODS, PapernotSteinke, SelectionEvent, single_run
from clipless.app import tuning
from clipless.app.data.dataset import Data, make_data
from clipless.app.training import TrainingSettings
from clipless.app.tuning import (
    Borrowed,
    Grid,
    InProcess,
    NothingToRelease,
    Processes,
    Search,
    parse_tries,
    plan_search,
    tune,
)
from clipless.app.tuning.execution import best, outcomes
from clipless.app.tuning.release import _draw_tasks
from clipless.app.tuning.worker import Outcome, Task, run
from clipless.clipping import CLIPPINGS
from clipless.errors import CliplessError, InvalidArgument, InvalidType, Misuse
from clipless.runs.ledger_file import read_ledger

SHARED = TrainingSettings(model="linear", epochs=2, batch_size=60)
HIDING = [name for name, method in METHODS.items() if not method.releases_all]


def records(count: int = 240) -> Data:
    """Two clouds, far enough apart to be learned in a few noisy steps."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, count + 100)
    points = rng.normal(size=(count + 100, 4)).astype(np.float32) + labels[:, None]
    return make_data("clouds", (points[:count], labels[:count]), (points[count:], labels[count:]))


DATA = records()


def planned(
    method: str | PapernotSteinke = "grid", shared: TrainingSettings = SHARED, **lists: Sequence[Any]
) -> Search:
    candidates = Grid(lists or {"lr": [0.01, 0.5]}).candidates(shared)
    return plan_search(DATA, candidates, epsilon=4.0, delta=4e-4, method=method)


class Watching:
    """Runs everything at once in this process, and lets a function look first."""

    def __init__(self, look: Callable[[Task], None]) -> None:
        self._look = look

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> "Future[Any]":
        self._look(args[0])
        return InProcess().submit(fn, *args)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_what_is_priced_is_what_every_clipping_releases(clipping: str) -> None:
    search = planned(clipping=[clipping], epochs=[1, 2])
    tuned = tune(search, seed=0)  # raises Misuse for a run that releases more
    assert tuned.result.epsilon == search.price.spent <= 4.0
    assert search.price.spent >= 0.99 * 4.0
    assert tuned.result.ledger is not None
    (entry,) = Ledger.from_dict(tuned.result.ledger).events
    assert entry == (search.event(), 1)


def test_a_run_with_less_noise_than_priced_is_noticed() -> None:
    search = planned()
    cheat = replace(search.candidates[1], noise_multiplier=0.9 * search.candidates[1].noise_multiplier)
    with pytest.raises(Misuse, match="released more than was recorded"):
        tune(replace(search, candidates=(search.candidates[0], cheat)), seed=0)


@pytest.mark.parametrize("method", METHODS)
def test_the_price_is_on_disk_before_the_first_run(method: str, tmp_path: Path) -> None:
    search = planned(method)
    seen = []

    def look(task: Task) -> None:
        found = read_ledger(tmp_path / "ledger.jsonl")
        assert found.recorded().events == ((search.event(), 1),)
        assert found.spent().epsilon == search.price.spent
        assert not (tmp_path / "model.pt").exists()
        seen.append(task)

    tuned = tune(search, Borrowed(Watching(look)), out=tmp_path)
    assert seen
    assert {path.name for path in tmp_path.iterdir()} == {"ledger.jsonl", "model.pt", "run.json"}
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["ledger"] == tuned.result.ledger
    assert record["metrics"]["epsilon"] == search.price.spent
    assert record["ledger_file"]["head"] == read_ledger(tmp_path / "ledger.jsonl").head
    assert ("scores" in record["tuning"]) == (method == "grid")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(weights[name], value) for name, value in tuned.result.model.state_dict().items())


def test_a_crash_leaves_the_whole_search_counted(tmp_path: Path) -> None:
    search = planned("papernot-steinke")

    def crash(task: Task) -> None:
        raise OSError("the machine is on fire")

    with pytest.raises(OSError, match="on fire"):
        tune(search, Borrowed(Watching(crash)), out=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"ledger.jsonl"}
    assert read_ledger(tmp_path / "ledger.jsonl").spent().epsilon == search.price.spent
    with pytest.raises(InvalidArgument, match="what it spent stays spent"):
        tune(search, out=tmp_path)


def test_an_earlier_search_in_the_folder_is_kept(tmp_path: Path) -> None:
    search = planned()
    tune(search, out=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == {"ledger.jsonl", "model.pt", "run.json"}
    with pytest.raises(InvalidArgument, match="choose another folder"):
        tune(search, out=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@given(st.lists(st.sampled_from([-math.inf, 0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=12), st.randoms())
def test_the_best_score_wins_whatever_the_order(scores: list[float], rng: random.Random) -> None:
    runs = [Outcome(place, candidate=place, score=score) for place, score in enumerate(scores)]
    rng.shuffle(runs)
    winner = best(iter(runs))
    assert winner.score == max(scores)
    assert winner.place == scores.index(max(scores))


def test_the_candidate_that_learns_is_chosen() -> None:
    tuned = tune(planned("grid", lr=[1e-9, 0.5, 1e-8]), seed=2)
    assert tuned.settings.lr == 0.5
    assert tuned.scores is not None
    assert tuned.result.score == max(tuned.scores) == tuned.scores[1] > 0.7


@pytest.mark.parametrize("method", METHODS)
def test_chosen_among_those_drawn(method: str) -> None:
    """The released run is the best of all runs that the seed draws, and only a grid tells of the others."""
    search = planned(method, lr=[1e-9, 0.01, 0.5])
    runs = list(outcomes(_draw_tasks(search, 5, DATA), InProcess(), lambda steps: None))
    tuned = tune(search, seed=5)
    assert tuned.result.score == max(one.score for one in runs)
    assert tuned.chosen == best(iter(runs)).candidate
    assert (tuned.scores is None) == (method != "grid")
    assert len(runs) > 1


def test_draws_come_from_the_operating_system_unless_seeded() -> None:
    """Two unseeded draws of two candidates are equal by chance, most often one run each; 40 are in 1 of 2 ** 117 cases."""
    search = planned("liu-talwar")
    seeded, again, *unseeded = (
        [(task.candidate, task.settings.seed) for task in _draw_tasks(search, seed, DATA)]
        for seed in (1, 1, *[None] * 40)
    )
    assert seeded == again
    assert any(draw != unseeded[0] for draw in unseeded)
    seeds = [seed for _, seed in seeded]
    assert all(seed is not None and seed.bit_length() == 129 for seed in seeds)
    assert len(set(seeds)) == len(seeds)
    assert all(seed is None for draw in unseeded for _, seed in draw)


def test_a_diverged_run_is_the_worst_and_does_not_vanish() -> None:
    tuned = tune(planned("grid", replace(SHARED, optimizer="rmsprop"), lr=[1e38, 0.01]), seed=0)
    assert tuned.scores is not None
    assert tuned.scores[0] == -math.inf
    assert tuned.chosen == 1
    assert tuned.record()["scores"][0] is None


BREAKING = """
import multiprocessing, os, signal
from pathlib import Path
from torch import nn

class Broken(nn.Linear):
    def forward(self, x):
        if self.training:
            raise ValueError("record 17 is a secret")
        return super().forward(x.flatten(1))

def breaks(shape, classes):
    return Broken(4, classes)

def works(shape, classes):
    return nn.Linear(4, classes)

def in_worker():
    return multiprocessing.parent_process() is not None

def dies_once(shape, classes):
    flag = Path(__file__).with_name("died")
    if in_worker() and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return works(shape, classes)

def always_dies(shape, classes):
    if in_worker():
        os.kill(os.getpid(), signal.SIGKILL)
    return works(shape, classes)
"""


@pytest.fixture
def breaking(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of models that fail, for this process and those it starts. These are forked from one that has imported what
    they need; that fresh ones do as well is seen in test_cli_tune.py."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "breaking.py").write_text(BREAKING)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(multiprocessing.context, "SpawnProcess", multiprocessing.context.ForkServerProcess)
    get_context("forkserver").set_forkserver_preload(["clipless.app.tuning.worker", "sklearn.datasets"])
    return folder


@pytest.mark.usefixtures("breaking")
def test_a_run_that_raises_is_an_outcome_without_its_message(capfd: pytest.CaptureFixture[str]) -> None:
    search = planned("grid", model=["breaking:breaks", "breaking:works"], lr=[0.5])
    tuned = tune(search, seed=0)
    assert tuned.scores is not None
    assert tuned.scores[0] == -math.inf
    assert tuned.chosen == 1
    with pytest.raises(NothingToRelease, match="the search is counted") as caught:
        tune(planned("papernot-steinke", model=["breaking:breaks"], lr=[0.1, 0.5]))
    assert "secret" not in str(caught.value)
    assert "secret" not in "".join(capfd.readouterr())


def test_a_killed_worker_changes_nothing_but_the_time(breaking: Path) -> None:
    search = planned("liu-talwar", model=["breaking:dies_once"], lr=[0.01, 0.5])
    seed = next(seed for seed in range(100) if len(_draw_tasks(search, seed, DATA)) == 3)
    undisturbed = tune(search, seed=seed)
    disturbed = tune(search, Processes(2), seed=seed)
    assert (breaking / "died").exists()
    assert disturbed.chosen == undisturbed.chosen
    assert disturbed.result.scores == undisturbed.result.scores
    before, after = undisturbed.result.model.state_dict(), disturbed.result.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_workers_end_when_what_started_them_is_killed(tmp_path: Path) -> None:
    """They would wait for their next run for ever."""
    script = f"""
        import os, signal
        from pathlib import Path
        from clipless.app.tuning.pools import Processes
        if __name__ == "__main__":
            pool = Processes(1)
            Path({str(tmp_path / "worker")!r}).write_text(str(pool.submit(os.getpid).result()))
            os.kill(os.getpid(), signal.SIGKILL)
    """
    file = tmp_path / "killed.py"
    file.write_text(dedent(script))
    assert subprocess.run([sys.executable, file], timeout=120, capture_output=True).returncode == -signal.SIGKILL
    worker, end = int((tmp_path / "worker").read_text()), time.monotonic() + 60
    while _lives(worker) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _lives(worker)


def _lives(process: int) -> bool:
    """Whether a process is there and has not ended; a zombie has."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.usefixtures("breaking")
def test_a_candidate_that_always_kills_its_worker_is_the_worst() -> None:
    search = planned("grid", model=["breaking:always_dies", "breaking:works"], lr=[0.5])
    tuned = tune(search, Processes(1), seed=0)
    assert tuned.settings.model == "breaking:works"
    assert tuned.scores is not None
    assert [math.isfinite(score) for score in tuned.scores] == [False, True]


@pytest.mark.usefixtures("breaking")
def test_a_broken_executor_of_the_callers_is_told_apart() -> None:
    search = planned("grid", model=["breaking:always_dies"], lr=[0.5])
    with (
        ProcessPoolExecutor(1, get_context("forkserver")) as executor,
        pytest.raises(Misuse, match="clipless.app.tuning.Processes"),
    ):
        tune(search, Borrowed(executor))


def test_any_executor_will_do() -> None:
    search = planned("papernot-steinke")
    with ThreadPoolExecutor(3) as executor:
        elsewhere = tune(search, Borrowed(executor, width=3), seed=3)
    assert elsewhere.result.scores == tune(search, seed=3).result.scores


def test_workers_with_other_data_are_refused() -> None:
    search = planned("grid")
    with pytest.raises(InvalidArgument, match="give every worker the same data"):
        tune(search, source="digits")


@pytest.mark.parametrize("method", HIDING)
def test_no_seed_and_no_loser_in_the_files(method: str, tmp_path: Path) -> None:
    search = planned(method, lr=[1e-9, 0.003, 0.5])
    seed = next(seed for seed in range(1000, 2000) if len(_draw_tasks(search, seed, DATA)) == 11)
    tasks = _draw_tasks(search, seed, DATA)
    losers = {one.score for one in outcomes(tasks, InProcess(), lambda steps: None)}
    tuned = tune(search, seed=seed, out=tmp_path)
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir()).decode(errors="replace")
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["arguments"]["seed"] == seed
    numbers = set(_numbers(record | {"history": None}))
    assert not (losers - set(tuned.result.scores)) & numbers
    assert len(losers - {tuned.result.score}) > 0
    assert len(tasks) not in numbers
    for task in tasks:
        assert str(task.settings.seed) not in written + repr(task) + repr(run(task))


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def test_secure_noise_gets_no_seed() -> None:
    search = planned("grid", replace(SHARED, noise="secure"))
    assert [task.settings.seed for task in _draw_tasks(search, None, DATA)] == [None, None]
    assert tune(search).result.settings.noise == "secure"
    with pytest.raises(InvalidArgument, match="takes no seed"):
        tune(search, seed=1)


def test_no_runs_drawn_is_no_model_and_still_counted(tmp_path: Path) -> None:
    search = planned(PapernotSteinke(2, mean=1.0, shape=math.inf))
    seed = next(seed for seed in range(100) if not _draw_tasks(search, seed, DATA))
    with pytest.raises(NothingToRelease, match="drawn is 0"):
        tune(search, seed=seed, out=tmp_path)
    assert read_ledger(tmp_path / "ledger.jsonl").spent().epsilon == search.price.spent


def test_progress_ends_at_one() -> None:
    shares: list[float] = []
    tune(planned("grid"), on_progress=shares.append, seed=0)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 2


def test_candidates_are_every_combination() -> None:
    grid = Grid({"lr": [0.1, 1], "optimizer": ["sgd", "adam"]}, {"epochs": 3})
    found = grid.candidates(SHARED)
    assert [(c.lr, c.optimizer) for c in found] == [(0.1, "sgd"), (0.1, "adam"), (1.0, "sgd"), (1.0, "adam")]
    assert {(c.epochs, c.model) for c in found} == {(3, "linear")}
    assert tuning.varied(found) == ("optimizer", "lr")


def test_a_grid_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text('[grid]\nlr = [0.1, 0.2]\nclipping = ["auto-s", "dc-e"]\n[settings]\nepochs = 3\n')
    flags = parse_tries(["lr=0.3", "batch-size=8,16"])
    found = tuning.read_grid(path).merged(flags).candidates(SHARED)
    assert [(c.lr, c.clipping, c.batch_size, c.epochs) for c in found] == [
        (0.3, "auto-s", 8, 3),
        (0.3, "auto-s", 16, 3),
        (0.3, "dc-e", 8, 3),
        (0.3, "dc-e", 16, 3),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[grid]\nlr = 0.1\n", "lr in the grid must be a list"),
        ("[grid]\nlr = []\n", "lr in the grid must be a list"),
        ("[grid]\nrate = [0.1]\n", "unknown setting 'rate'"),
        ("[grid]\nepsilon = [1, 2]\n", "epsilon cannot be tried: it is the same for all candidates"),
        ("[grid]\nepochs = [1.5]\n", "epochs must be of type int"),
        ("[grid]\nlr = [true]\n", "lr must be of type float"),
        ("[grid]\nlr = [0.1, 0.1]\n", "a candidate twice"),
        ('[grid]\nclipping = ["none"]\n', "cannot be one of the candidates"),
        ("[settings]\nseed = 3\n", "unknown setting 'seed'"),
        ("[grids]\nlr = [1]\n", "did you mean 'grid'"),
        ("grid = 3\n", "write a table"),
        ("lr = [", "is not TOML"),
    ],
)
def test_a_grid_that_cannot_be_meant(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(content)
    with pytest.raises((InvalidArgument, InvalidType), match=message):
        tuning.read_grid(path).candidates(SHARED)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tuning.read_grid(Path("nowhere.toml")), "cannot read the grid"),
        (lambda: parse_tries(["lr"]), "names no values"),
        (lambda: parse_tries(["lr=1", "lr=2"]), "given twice"),
        (lambda: parse_tries(["epochs=many"]).candidates(SHARED), "is not a number"),
        (lambda: Grid({"lr": range(1, 200), "epochs": range(1, 200)}).candidates(SHARED), "at most 10000"),
        (lambda: plan_search(DATA, [], epsilon=1.0), "no candidate"),
        (lambda: planned(batch_size=[300]), "batch_size is 300"),
        (lambda: planned(optimizer=["sdg"]), "did you mean 'sgd'"),
        (lambda: planned("papernot"), "did you mean 'papernot-steinke'"),
        (lambda: plan_search(DATA, [SHARED], epsilon=1.0, delta=1e-3, accountant="gdp"), "take 'pld' or 'rdp'"),
        (lambda: tuning.open_pool("dask"), "belong together"),
        (lambda: tuning.open_pool("local", address="tcp://x:1"), "belong together"),
        (lambda: tuning.open_pool("local", 4), "need --executor processes"),
        (lambda: tuning.open_pool("proceses"), "did you mean 'processes'"),
        (lambda: Borrowed(3), "submit"),  # type: ignore[arg-type]
    ],
)
def test_refused_before_anything_is_spent(call: Callable[[], object], message: str) -> None:
    with pytest.raises(CliplessError, match=message):
        call()


def test_without_delta_it_follows_from_the_records() -> None:
    search = plan_search(DATA, [SHARED], epsilon=2.0, method="grid")
    assert search.price.delta == 1e-5
    assert search.event() == SelectionEvent.of(search.price.method, search.runs)


PAGE = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(code, "docs/tuning.md", "exec"), {})
    assert "needs the least noise for the same total" in capsys.readouterr().out


@pytest.mark.parametrize("candidates", [2, 10, 100])
def test_the_table_of_the_page_is_true(candidates: int) -> None:
    (row,) = re.findall(rf"^\| {candidates} \|(.*)\|$", PAGE, flags=re.MULTILINE)
    computed = [single_run(name, 3.0, 1e-5, candidates, 0.05, 800).noise_multiplier for name in METHODS]
    assert [float(cell) for cell in row.split("|")] == pytest.approx(computed, rel=0.01)


def test_the_grid_of_the_page_is_a_grid(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "grid.toml").write_text(text)
    assert len(tuning.read_grid(tmp_path / "grid.toml").candidates(SHARED)) == 6
