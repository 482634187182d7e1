"""`clipless bench`: the time and memory of a private step against a plain one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from clipless.bench import chart, readme, results
from clipless.bench.problems import PROBLEMS
from clipless.bench.results import MEASURED, BenchResult, WayResult
from clipless.bench.run import Settings, run
from clipless.bench.scaling import AXES
from clipless.bench.ways import CLIPLESS, chosen, listed
from clipless.bench.work import Report
from clipless.cli import _output
from clipless.training import check_writable

ROUNDS, QUICK_ROUNDS = 30, 3
TIME = {
    "ms": ("min_ms", ".4g"),
    "x minima": ("ratio_of_minima", ".2f"),
    "x median": ("median_of_ratios", ".2f"),
    "spread": ("median_over_minimum", ".2f"),
}
MEMORY = {
    "peak MB": ("peak_mb", ".0f"),
    "x peak": ("peak_over_plain", ".2f"),
    "above import MB": ("peak_above_import_mb", ".0f"),
    "x above import": ("peak_above_import_over_plain", ".2f"),
}


def bench(
    models: Annotated[str, typer.Option(help=f"Which of {', '.join(PROBLEMS)}; all of them by default.")] = "all",
    clippings: Annotated[
        str, typer.Option(help=f"short (auto-s, auto-s per-layer, dc-e), all, or some of {', '.join(CLIPLESS)}.")
    ] = "short",
    rounds: Annotated[
        int | None,
        typer.Option(help="Timed steps of every way, in turn; more if they are short. Default: 30, with --quick 3."),
    ] = None,
    warm_up: Annotated[int, typer.Option(help="Steps of every way before the clock is looked at.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of torch, in every way the same.")] = 2,
    opacus: Annotated[
        bool | None, typer.Option("--opacus/--no-opacus", help="Compare with Opacus. Default: where it is installed.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Peak memory of each way, in a process of its own.")
    ] = True,
    scaling: Annotated[str, typer.Option(help=f"Growth curves: all, none, or some of {', '.join(AXES)}.")] = "all",
    budget: Annotated[
        float, typer.Option("--seconds-per-way", help="A way slower than this over its rounds stops early.")
    ] = 120.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny models and few rounds: to try the command, not to quote.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for bench.json and the charts. Default: runs/bench, or where --from lies."),
    ] = None,
    stored: Annotated[
        Path | None, typer.Option("--from", help="Show and draw this result again instead of measuring.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--readme", help="Also put the speed table between the markers of this page.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")
    ] = False,
) -> None:
    """Time and peak memory of one private training step over plain training, and how both grow.

    All ways take their steps in turn in one process, on the same records, noise included. With --readme the table goes
    between the lines <!-- speed --> and <!-- end of speed --> of a page. The exit code is 1 when a way of clipless failed.
    """
    result = None if stored is None else results.load(stored)
    folder = out or (stored.parent if stored else Path("runs/bench"))
    check_writable(folder)
    if result is None:
        times = (QUICK_ROUNDS if quick else ROUNDS) if rounds is None else rounds
        settings = Settings(
            models=tuple(PROBLEMS) if models == "all" else listed(models),
            ways=chosen(clippings, opacus),
            rounds=times,
            warm_up=warm_up,
            threads=threads,
            budget=budget,
            memory=memory,
            axes={"all": tuple(AXES), "none": ()}.get(scaling, listed(scaling)),
            scaling_rounds=(times + 1) // 2,
            tiny=quick,
        ).checked()
        with _progress(visible=not as_json) as report:
            result = run(settings, report, keep=lambda so_far: results.save(so_far, folder / "bench.json"))
    drawn = chart.draw(result, folder)
    if page is not None:
        readme.write(result, page)
    if as_json:
        _output.show_json(result.to_dict())
    else:
        _show(result, [*([folder / "bench.json"] if stored is None else []), *drawn])
    if result.failures():
        raise typer.Exit(1)


@contextmanager
def _progress(*, visible: bool) -> Iterator[Report]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bar:
        task = bar.add_task("one step of each model", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _show(result: BenchResult, written: list[Path]) -> None:
    console = Console()
    console.print(_by_model("Time of a training step, x times plain training", result, TIME))
    if any(way.memory for model in result.models.values() for way in model.ways.values()):
        console.print(_by_model("Peak memory, x times plain training", result, MEMORY))
    for name, model in result.models.items():
        for way, found in model.ways.items():
            if note := _note(found):
                _say(console, f"{name}, {way}: {note}")
    console.print(_means(result))
    if result.scaling:
        console.print(_growth(result))
    _say(console, f"{readme.where(result)}, load average before {result.machine['load_average_before']}")
    for path in written:
        _say(console, f"written: {path}")
    if not chart.installed():
        _output.show_note("no charts were drawn, as matplotlib is not installed: pip install 'clipless[figures]'.")
    for warning in result.warnings():
        _output.show_note(warning)


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False, highlight=False)


def _by_model(title: str, result: BenchResult, columns: Mapping[str, tuple[str, str]]) -> Table:
    """A row for each way of each model; a way without numbers tells its status."""
    table = Table(title=title, title_justify="left")
    for name in ("model", "way"):
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for name, model in result.models.items():
        for number, (way, found) in enumerate(model.ways.items()):
            figures = found.figures(model.plain)
            cells = [format(figures[key], spec) if key in figures else "-" for key, spec in columns.values()]
            cells = cells if found.status == MEASURED else [found.status, *cells[1:]]
            table.add_row("" if number else name, way, *cells, end_section=number == len(model.ways) - 1)
    return table


def _note(way: WayResult) -> str:
    parts = [
        f"{way.status}: {way.reason}" if way.reason else None,
        way.note,
        f"stopped after {len(way.ms)} rounds" if way.capped else None,
        f"memory: {way.memory_reason}" if way.memory_reason else None,
    ]
    return "; ".join(part for part in parts if part)


def _means(result: BenchResult) -> Table:
    table = Table("way", "x minima", "x median", "models", title="Geometric means", title_justify="left")
    for way, mean in result.geometric_means().items():
        ratios = (f"{mean[name]:.3f}" for name in ("ratio_of_minima", "median_of_ratios"))
        table.add_row(way, *ratios, f"{mean['models']} of {len(result.models)}")
    return table


def _growth(result: BenchResult) -> Table:
    table = Table(title="Growth: slopes of time on logarithmic axes", title_justify="left")
    for name in ("against", "plain", "auto-s", "ratio of slopes", "x at the smallest", "x at the largest"):
        table.add_column(name, justify="left" if name == "against" else "right")
    for curve in result.scaling.values():
        slopes = (curve.plain_slope, curve.private_slope, curve.slope_ratio)
        ends = (curve.private_ms[end] / curve.plain_ms[end] for end in (0, -1))
        table.add_row(curve.title, *(f"{value:.2f}" for value in (*slopes, *ends)))
    return table
