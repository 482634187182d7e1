"""`clipless tune`: try a grid of settings under one guarantee, release the best run."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from clipless import defaults
from clipless.accounting.selection import AUTO, METHODS, SingleRun, prices
from clipless.app import tuning
from clipless.app.cli import _output
from clipless.app.cli._data_options import DataGroup
from clipless.app.cli._options import JsonOption
from clipless.app.cli._progress import fraction_bar
from clipless.app.cli._training_options import DeltaOption, LearningRateOption, NoiseOption
from clipless.app.models import MODELS
from clipless.app.training import OPTIMIZERS, TrainingSettings
from clipless.arguments import large_delta_note
from clipless.clipping import CLIPPINGS
from clipless.errors import InvalidArgument
from clipless.runs.run_folder import RunFolder

_DEFAULTS = TrainingSettings()


def tune(
    data: DataGroup,
    grid: Annotated[
        Path | None, typer.Option(help="TOML file with a table `grid` of lists to try, and `settings` that all share.")
    ] = None,
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            help=f"Values to try, as lr=0.05,0.1. One of {', '.join(tuning.TUNABLE)}, or a number of the clipping as "
            "clipping.percentile=0.1,0.3,0.5; repeatable.",
        ),
    ] = None,
    epsilon: Annotated[float, typer.Option(help="The privacy budget of the whole search.")] = _DEFAULTS.epsilon,
    delta: DeltaOption = None,
    method: Annotated[str, typer.Option(help=f"{AUTO} (the least noise), {', '.join(METHODS)}.")] = AUTO,
    coverage: Annotated[
        float | None,
        typer.Option(help="Chance that the best candidate is tried, where not all are. Default: over 2/3."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"{', '.join(MODELS)}, or package.module:factory. Default: {_DEFAULTS.model}.")
    ] = None,
    clipping: Annotated[
        str | None, typer.Option(help=f"{', '.join(CLIPPINGS)}. Default: {_DEFAULTS.clipping}.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help=f"Of each run. Default: {_DEFAULTS.epochs}.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help=f"Expected size of a batch. Default: {_DEFAULTS.batch_size}.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help=f"{', '.join(OPTIMIZERS)}. Default: {_DEFAULTS.optimizer}.")
    ] = None,
    lr: LearningRateOption = None,
    accountant: Annotated[
        str, typer.Option(help="pld or rdp; papernot-steinke always takes rdp.")
    ] = defaults.ACCOUNTANT,
    noise: NoiseOption = _DEFAULTS.noise,
    executor: Annotated[str, typer.Option(help=f"Where runs are executed: {', '.join(tuning.EXECUTORS)}.")] = "local",
    workers: Annotated[int | None, typer.Option(help="Runs at a time. Default: as many as there are.")] = None,
    dask_address: Annotated[str | None, typer.Option(help="Of the Dask scheduler, as tcp://host:8786.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="For tests: repeats a search. Whoever knows the seed can subtract the noise. Default: none."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the files. Default: runs/DATA-tuned.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the price and stop; nothing is spent.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a grid of candidates, choose the best by its test, and release it under one total (epsilon, delta).

    The price of the whole search is in ledger.jsonl before the first run begins. Only --method grid pays for showing every
    run; otherwise nothing of the other runs is shown or stored: no score, no model, not even their number.
    """
    given: dict[str, Any] = {"model": model, "clipping": clipping, "epochs": epochs, "batch_size": batch_size}
    given |= {"optimizer": optimizer, "lr": lr}
    fixed = {name: value for name, value in given.items() if value is not None}
    lists = tuning.read_grid(grid) if grid else tuning.Grid({})
    lists = lists.merged(tuning.parse_tries(tries or [])).merged(tuning.Grid({}, fixed))
    if not lists.values:
        raise InvalidArgument(
            "there is nothing to try: give --try lr=0.05,0.1 or --grid FILE. For a single run, use clipless train."
        )
    records = data.load()
    with _large_delta_told_once():
        search = tuning.plan_search(
            records,
            lists.candidates(replace(_DEFAULTS, noise=noise)),
            epsilon=epsilon,
            delta=delta,
            method=method,
            coverage=coverage,
            accountant=accountant,
        )
    if dry_run:
        _show_price(search, coverage, as_json)
        return
    folder = out or Path("runs") / f"{records.name}-tuned"
    RunFolder(folder).check_writable()
    pool = tuning.open_pool(executor, workers, dask_address)
    source = None if executor == "local" else data.remote()
    # On a terminal only: the bar shows how many runs were drawn, which the guarantee does not cover.
    with _large_delta_told_once(), fraction_bar("tuning", visible=not as_json) as on_progress:
        tuned = tuning.tune(search, pool, source=source, out=folder, seed=seed, on_progress=on_progress)
    if as_json:
        _output.show_json(_record(tuned, folder))
        return
    _output.show_table("Tuned", _summary(tuned, folder))
    for note in _notes(tuned):
        _output.show_note(note)


@contextmanager
def _large_delta_told_once() -> Iterator[None]:
    """Suppress the warning of every run about a large delta; the command shows it once, in its notes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="delta=.* is above 1/N")
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
        _output.show_json(search.describe() | priced)
        return
    rows = {
        one.method.name: f"noise {_output.short(one.noise_multiplier)}, one run ({_output.short(one.run_epsilon)}, "
        f"{_output.short(one.run_delta)}), {_output.short(one.expected_runs)} runs on average, best candidate tried with "
        f"chance {one.coverage:.0%}"
        for one in every
    }
    total = f"({_output.short(chosen.epsilon)}, {_output.short(chosen.delta)}), {chosen.accountant}"
    _output.show_table("Price", {"candidates": str(len(shapes)), "total": total, **rows, "chosen": chosen.method.name})
    typer.echo(chosen.explanation)
    for note in _delta_notes(search):
        _output.show_note(note)


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
        "notes": _notes(tuned),
    }


def _summary(tuned: tuning.Tuned, folder: Path) -> dict[str, str]:
    priced, settings = tuned.search.price, tuned.settings
    names = tuning.varied(tuned.search.candidates)
    shown = (
        {}
        if tuned.scores is None
        else {"scores": ", ".join(_score(tuned.result.metric, score) for score in tuned.scores)}
    )
    return {
        "data": tuned.result.data,
        "chosen": ", ".join(f"{name} {getattr(settings, name)}" for name in names) or "the only candidate",
        "of": f"{len(tuned.search.candidates)} candidates, by {priced.method.name}",
        **shown,
        f"test {tuned.result.metric.replace('_', ' ')}": _output.metric_text(tuned.result.metric, tuned.result.score),
        "epsilon": f"{_output.short(tuned.result.epsilon)} for the whole search",
        "delta": _output.short(tuned.result.delta),
        "one run": f"({_output.short(priced.run_epsilon)}, {_output.short(priced.run_delta)}), noise "
        f"{_output.short(settings.noise_multiplier)}",
        "written": f"{folder / 'run.json'}, model.pt, ledger.jsonl",
    }


def _score(metric: str, score: float) -> str:
    """The score of a candidate for a reader; errors, of which less is better, are scored by their negative."""
    return "failed" if math.isinf(score) else _output.metric_text(metric, abs(score))


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
