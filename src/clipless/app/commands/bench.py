"""The body of `clipless bench`."""

from collections.abc import Mapping
from pathlib import Path

import typer
from rich.table import Table

from clipless.app.bench import chart, machine, readme, results, store
from clipless.app.bench.problems import PROBLEMS
from clipless.app.bench.results import MEASURED, BenchResult, WayResult
from clipless.app.bench.run import BenchSettings
from clipless.app.bench.scaling import AXES
from clipless.app.bench.ways import chosen, listed
from clipless.app.commands.bench_process import measure_to_file
from clipless.app.commands.bench_ranks import bench_processes
from clipless.app.options.bench import MeasurementGroup, ResultsGroup
from clipless.app.terminal import output
from clipless.app.terminal.output import Console
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


def run(asked: MeasurementGroup, files: ResultsGroup, *, as_json: bool) -> None:
    """Measure or load results, draw and show them; exit code 1 if a way of clipless failed."""
    rounds = asked.rounds if asked.rounds is not None else (QUICK_ROUNDS if asked.quick else ROUNDS)
    place = files.out or Path("runs/bench")
    if asked.processes > 1:
        which = ("encoder",) if asked.models == "all" else listed(asked.models)
        bench_processes(
            which, asked.processes, rounds, tiny=asked.quick, peak=asked.memory, folder=place, as_json=as_json
        )
        return
    if files.stored is None:
        folder, found = place, _measure(_settings(asked, rounds), place, asked.malloc, visible=not as_json)
    else:
        found, folder = store.load(files.stored), files.stored
    written = [*(found if files.stored is None else ()), *_draw_charts(found, files.out if files.stored else None)]
    if files.page is not None:
        readme.write(list(store.load(folder).values()), files.page)
    if as_json:
        records = [result.to_dict() for result in found.values()]
        output.show_json(records[0] if len(records) == 1 else {"results": records})
    else:
        _show(list(found.values()), written)
    if any(result.failures() for result in found.values()):
        raise typer.Exit(1)


def _settings(asked: MeasurementGroup, rounds: int) -> BenchSettings:
    return BenchSettings(
        models=tuple(PROBLEMS) if asked.models == "all" else listed(asked.models),
        ways=chosen(asked.clippings, asked.opacus),
        rounds=rounds,
        warm_up=asked.warm_up,
        threads=asked.threads,
        budget=asked.budget,
        memory=asked.memory,
        axes={"all": tuple(AXES), "none": ()}.get(asked.scaling, listed(asked.scaling)),
        scaling_rounds=(rounds + 1) // 2,
        tiny=asked.quick,
    ).checked()


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
        output.show_note("no charts were drawn, as matplotlib is not installed: pip install 'clipless[figures]'.")
    for result in found:
        for warning in result.warnings():
            output.show_note(warning)


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
