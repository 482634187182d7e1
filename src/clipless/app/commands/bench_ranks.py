"""`clipless bench --processes`: one process and several, side by side."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from clipless.app.bench import machine
from clipless.app.bench.problems import PROBLEMS
from clipless.app.bench.processes import PAIRS_IN_ONE, Comparison, compare
from clipless.app.terminal import output
from clipless.app.terminal.output import Console
from clipless.app.terminal.progress import PERCENT, progress_bar
from clipless.arguments import named
from clipless.runs.durable_files import replace_file
from clipless.runs.run_folder import RunFolder


def bench_processes(
    models: Sequence[str], processes: int, rounds: int, *, tiny: bool, peak: bool, folder: Path, as_json: bool
) -> None:
    """Measure these models, show the result and write it to processes.json in the machine's folder."""
    for name in models:
        named("model", name, PROBLEMS)
    about = machine.facts() | {"threads": 1, "load_average_before": machine.load_average()}
    place = folder / machine.slug(about)
    RunFolder(place).check_writable()
    found = []
    with progress_bar(PERCENT, visible=not as_json) as bar:
        task = bar.add_task("", total=len(models))
        for number, name in enumerate(models):
            bar.update(task, description=f"{name} in {processes} processes", completed=number)
            found.append(compare(name, processes, rounds, tiny, peak))
        bar.update(task, completed=len(models))
    record = {"machine": about, "models": [one.to_dict() for one in found]}
    replace_file(place / "processes.json", lambda file: file.write(json.dumps(record, indent=2).encode() + b"\n"))
    if as_json:
        output.show_json(record)
    else:
        Console().print(_table(found, processes))


def _table(found: Sequence[Comparison], processes: int) -> Table:
    table = Table(title=f"One process and {processes}, of one thread each", title_justify="left")
    ends = (f"ms in {processes}", "x throughput", "x plain in 1", f"x plain in {processes}", "MB a rank")
    for column in ("model", "way", "ms in 1", *ends):
        table.add_column(column, justify="left" if column in ("model", "way") else "right")
    for one in found:
        for way, alone in PAIRS_IN_ONE.items():
            times = (f"{one.one.min_ms[alone]:.4g}", f"{one.several.min_ms[way]:.4g}")
            over = (
                f"{world.private_over_plain.get(own, 1.0):.2f}" for world, own in ((one.one, alone), (one.several, way))
            )
            most = one.several.peak_above_import_mb.get(way, math.nan)
            table.add_row(one.model, way, *times, f"{one.speedup(way):.2f}", *over, f"{most:.0f}")
    return table
