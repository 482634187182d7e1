"""`clipless bench`: the time and memory of a private step against a plain one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from clipless.app.bench import chart, machine, readme, results, store
from clipless.app.bench.problems import PROBLEMS
from clipless.app.bench.results import MEASURED, BenchResult, WayResult
from clipless.app.bench.run import BenchSettings
from clipless.app.bench.scaling import AXES
from clipless.app.bench.ways import CLIPLESS, chosen, listed
from clipless.app.cli import _output
from clipless.app.cli._bench_process import measure_to_file
from clipless.app.cli._bench_ranks import bench_processes
from clipless.app.cli._options import JsonOption
from clipless.arguments import unknown_name
from clipless.runs.run_folder import RunFolder

ROUNDS, QUICK_ROUNDS = 30, 3
MALLOC = {"off": (False,), "on": (True,), "both": (False, True)}
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
    warm_up: Annotated[int, typer.Option(help="Untimed steps of every way before the timed ones.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of torch, the same for every way.")] = 2,
    opacus: Annotated[
        bool | None, typer.Option("--opacus/--no-opacus", help="Compare with Opacus. Default: if it is installed.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Peak memory of each way, in a process of its own.")
    ] = True,
    scaling: Annotated[str, typer.Option(help=f"Growth curves: all, none, or some of {', '.join(AXES)}.")] = "all",
    budget: Annotated[
        float, typer.Option("--seconds-per-way", help="A way slower than this over its rounds stops early.")
    ] = 120.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny models and few rounds: for trying out, not for quoting.")
    ] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="From 2 on: auto-s against plain DistributedDataParallel, and nothing else.")
    ] = 1,
    malloc: Annotated[
        str,
        typer.Option(
            help="Measure with glibc keeping the memory it has (MALLOC_ variables set): off, on, or both in turn."
        ),
    ] = "off",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder with a folder for each machine: bench.json and charts. Default: runs/bench."),
    ] = None,
    stored: Annotated[
        Path | None,
        typer.Option("--from", help="Show and draw this result, or all in this folder, instead of measuring."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--readme", help="Also put the speed tables of all machines between the markers of this page."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time and peak memory of one private training step over plain training, and how both grow.

    All ways take their steps in turn in one process, on the same records, noise included. Results are kept by machine.
    With --readme the tables of all in the folder go between the lines <!-- speed --> and <!-- end of speed --> of a page.
    The exit code is 1 when a way of clipless failed.
    """
    times = (QUICK_ROUNDS if quick else ROUNDS) if rounds is None else rounds
    place = out or Path("runs/bench")
    if processes > 1:
        which = ("encoder",) if models == "all" else listed(models)
        bench_processes(which, processes, times, tiny=quick, peak=memory, folder=place, as_json=as_json)
        return
    if stored is None:
        settings = BenchSettings(
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
        folder, found = place, _measure(settings, place, malloc, visible=not as_json)
    else:
        found, folder = store.load(stored), stored
    written = [*(found if stored is None else ()), *_draw_charts(found, out if stored else None)]
    if page is not None:
        readme.write(list(store.load(folder).values()), page)
    if as_json:
        records = [result.to_dict() for result in found.values()]
        _output.show_json(records[0] if len(records) == 1 else {"results": records})
    else:
        _show(list(found.values()), written)
    if any(result.failures() for result in found.values()):
        raise typer.Exit(1)


def _measure(settings: BenchSettings, folder: Path, malloc: str, visible: bool) -> dict[Path, BenchResult]:
    """The results, by file."""
    if malloc not in MALLOC:
        raise unknown_name("value of --malloc", malloc, MALLOC)
    RunFolder(folder).check_writable()
    files = [measure_to_file(settings, folder, malloc=each, visible=visible) for each in MALLOC[malloc]]
    return {file: results.load(file) for file in files}


def _draw_charts(found: Mapping[Path, BenchResult], out: Path | None) -> list[Path]:
    """Charts of every result, beside its file or in the machine's folder of `out`."""
    files: list[Path] = []
    for path, result in found.items():
        folder = out / machine.slug(result.machine) if out else path.parent
        RunFolder(folder).check_writable()
        files += chart.draw(result, folder)
    return files


def _show(found: list[BenchResult], written: list[Path]) -> None:
    console = Console()
    for result in found:
        _show_one(console, result)
    for path in written:
        _say(console, f"written: {path}")
    if not chart.installed():
        _output.show_note("no charts were drawn, as matplotlib is not installed: pip install 'clipless[figures]'.")
    for result in found:
        for warning in result.warnings():
            _output.show_note(warning)


def _show_one(console: Console, result: BenchResult) -> None:
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


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False, highlight=False)


def _by_model(title: str, result: BenchResult, columns: Mapping[str, tuple[str, str]]) -> Table:
    """A row for each way of each model; a way without numbers shows its status."""
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
        values = (curve.plain_slope, curve.private_slope, curve.slope_ratio)
        ends = (curve.private_ms[end] / curve.plain_ms[end] for end in (0, -1))
        table.add_row(curve.title, *("-" if value is None else f"{value:.2f}" for value in (*values, *ends)))
    return table
