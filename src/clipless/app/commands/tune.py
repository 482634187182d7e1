"""The body of `clipless tune`."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from clipless.accounting.selection import SingleRun, prices
from clipless.app import tuning
from clipless.app.commands.chosen_data import load_data, own_data, remote_name
from clipless.app.commands.effective_config import config_text
from clipless.app.data import Data
from clipless.app.options.data import DataGroup
from clipless.app.options.tuning import ExecutorGroup, SearchGroup, SharedGroup
from clipless.app.settings import TrainingSettings
from clipless.app.terminal import output
from clipless.app.terminal.progress import fraction_bar
from clipless.app.terminal.streams import showing_run
from clipless.arguments import large_delta_note
from clipless.errors import InvalidArgument
from clipless.runs.run_folder import RunFolder


@dataclass(frozen=True)
class TuneRequest:
    """What is asked for. `columns` and `table` are tables of a configuration file: rules of the data's columns, and lists
    to try."""

    data: DataGroup
    columns: Mapping[str, Any]
    search: SearchGroup
    table: Mapping[str, Any]
    shared: SharedGroup
    executor: ExecutorGroup
    noise: str | None
    seed: int | None
    out: Path | None

    def grid(self) -> tuning.Grid:
        """The lists to try and the settings that all share, those of the command line over those of files. Raises
        InvalidArgument if there is no list, and for a setting that is both shared and to be tried."""
        lists = tuning.Grid(tuning.flattened(self.table))
        if self.search.grid:
            lists = lists.merged(tuning.read_grid(self.search.grid))
        lists = lists.merged(tuning.parse_tries(self.search.tries or []))
        if not lists.values:
            raise InvalidArgument(
                "there is nothing to try: give --try lr=0.05,0.1 or --grid FILE. For a single run, use clipless train."
            )
        for name in self._shared():
            if name in lists.values:
                raise InvalidArgument(
                    f"{name} has one value for all candidates and a list to try: give one of the two."
                )
        return lists.merged(tuning.Grid({}, self._shared()))

    def _shared(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self.shared).items() if value is not None}

    def plan(self, records: Data) -> tuning.Search:
        """The search and its price."""
        asked = self.search
        return tuning.plan_search(
            records,
            self.grid().candidates(TrainingSettings(noise=self.noise)),
            epsilon=asked.epsilon,
            delta=asked.delta,
            method=asked.method,
            coverage=asked.coverage,
            accountant=asked.accountant,
        )

    def config(self) -> str:
        """The effective configuration, with all lists in one table. Where runs are executed is not part of it."""
        asked = {name: value for name, value in asdict(self.search).items() if name not in ("grid", "tries")}
        lists = {name: values for name, values in self.grid().as_lists().items() if name not in self._shared()}
        options = {**asked, **self._shared(), "noise": self.noise, "grid": lists}
        return config_text("tune", self.data, own_data(self.data, **self.columns), options)


def run(request: TuneRequest, *, dry_run: bool, as_json: bool) -> None:
    """Search, save and show the released run, or the price alone."""
    request.grid()  # refuses before the data is loaded
    if request.out is not None:
        RunFolder(request.out).refuse_private_run()
    records = load_data(request.data, **request.columns)
    with _large_delta_told_once():
        search = request.plan(records)
    if dry_run:
        _show_price(search, request.search.coverage, as_json)
        return
    folder = request.out or Path("runs") / f"{records.name}-tuned"
    RunFolder(folder).check_writable()
    where = request.executor
    pool = tuning.open_pool(where.executor, where.workers, where.dask_address)
    stated = own_data(request.data, **request.columns)
    source = None if where.executor == "local" else remote_name(request.data, stated)
    # On a terminal only: the bar shows how many runs were drawn, which the guarantee does not cover.
    with _told_if_stopped(folder), _large_delta_told_once(), fraction_bar("tuning", visible=not as_json) as on_progress:
        tuned = tuning.tune(
            search,
            pool,
            source=source,
            out=folder,
            seed=request.seed,
            on_progress=on_progress,
            config=request.config(),
        )
    if as_json:
        with showing_run(folder):
            output.show_json(_record(tuned, folder))
        return
    with showing_run(folder):
        output.show_table("Tuned", _summary(tuned, folder))
        for note in _notes(tuned):
            output.show_note(note)


@contextmanager
def _told_if_stopped(folder: Path) -> Iterator[None]:
    """Ctrl-C after a search was recorded: say what it costs."""
    try:
        yield
    except KeyboardInterrupt:
        if RunFolder(folder).unfinished:
            output.show_warning(
                f"Stopped, and nothing is released. A search cannot be resumed, and what it spent stays spent: "
                f"{RunFolder(folder).ledger}."
            )
        raise


@contextmanager
def _large_delta_told_once() -> Iterator[None]:
    """Suppress the warning of every run about a large delta; the command shows it once, in its notes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="delta=.* is above 1/")
        yield


def _delta_notes(search: tuning.Search) -> list[str]:
    note = large_delta_note(search.price.delta, len(search.data.train))
    return [note] if note else []


def _show_price(search: tuning.Search, coverage: float | None, as_json: bool) -> None:
    chosen = search.price
    shapes = [tuning.shape_of(one, len(search.data.train)) for one in search.candidates]
    every = prices(chosen.epsilon, chosen.delta, shapes, chosen.accountant, coverage)
    if as_json:
        priced = {"prices": {one.method.name: _figures(one) for one in every}, "notes": _delta_notes(search)}
        output.show_json(search.describe() | priced)
        return
    rows = {
        one.method.name: f"noise {output.short(one.noise_multiplier)}, one run ({output.short(one.run_epsilon)}, "
        f"{output.short(one.run_delta)}), {output.short(one.expected_runs)} runs on average, best candidate tried with "
        f"chance {one.coverage:.0%}"
        for one in every
    }
    total = f"({output.short(chosen.epsilon)}, {output.short(chosen.delta)}), {chosen.accountant}"
    output.show_table("Price", {"candidates": str(len(shapes)), "total": total, **rows, "chosen": chosen.method.name})
    typer.echo(chosen.explanation)
    for note in _delta_notes(search):
        output.show_note(note)


def _figures(priced: SingleRun) -> dict[str, Any]:
    return {
        "noise_multiplier": priced.noise_multiplier,
        "run_epsilon": priced.run_epsilon,
        "run_delta": priced.run_delta,
        "epsilon": priced.spent,
        "expected_runs": priced.expected_runs,
        "most_runs": priced.most_runs,
        "coverage": priced.coverage,
    }


def _record(tuned: tuning.Tuned, folder: Path) -> dict[str, Any]:
    return {
        "private": True,
        "data": tuned.result.data,
        "tuning": tuned.record(),
        "metrics": tuned.result.metrics(),
        "run": str(folder / "run.json"),
        "model": str(folder / "model.pt"),
        "config": str(folder / "config.toml"),
        "notes": _notes(tuned),
    }


def _summary(tuned: tuning.Tuned, folder: Path) -> dict[str, str]:
    priced, settings = tuned.search.price, tuned.settings
    names = tuning.varied(tuned.search.candidates)
    shown = (
        {}
        if tuned.scores is None
        else {"scores (not private)": ", ".join(_score(tuned.result.metric, score) for score in tuned.scores)}
    )
    return {
        "data": tuned.result.data,
        "chosen": ", ".join(f"{name} {getattr(settings, name)}" for name in names) or "the only candidate",
        "of": f"{len(tuned.search.candidates)} candidates, by {priced.method.name}",
        **shown,
        f"test {tuned.result.metric.replace('_', ' ')} (not private)": output.metric_text(
            tuned.result.metric, tuned.result.score
        ),
        "epsilon": f"{output.short(tuned.result.epsilon)} for the whole search",
        "delta": output.short(tuned.result.delta),
        "one run": f"({output.short(priced.run_epsilon)}, {output.short(priced.run_delta)}), noise "
        f"{output.short(settings.noise_multiplier)}",
        "written": f"{folder / 'run.json'}, model.pt, ledger.jsonl, config.toml",
    }


def _score(metric: str, score: float) -> str:
    """The score of a candidate for a reader; errors, of which less is better, are scored by their negative."""
    return "failed" if math.isinf(score) else output.metric_text(metric, abs(score))


def _notes(tuned: tuning.Tuned) -> list[str]:
    notes = [
        *tuned.search.data.notes,
        *_delta_notes(tuned.search),
        tuned.search.price.explanation,
        f"The score is {tuning.SCORE}",
    ]
    if not tuned.search.price.method.releases_all:
        notes.append(
            "Keep to yourself how long this took: the guarantee is for the released run, not for their number."
        )
    if tuned.result.settings.seed is not None:
        notes.append("The seed is fixed: whoever knows it can subtract the noise. Release runs without --seed only.")
    return notes
