"""Options of `clipless bench`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from clipless.app import names
from clipless.app.options.common import listing, starting


@dataclass(frozen=True)
class MeasurementGroup:
    """What is measured, and for how long."""

    models: Annotated[
        str,
        typer.Option(
            help=f"Which of {', '.join(names.BENCH_MODELS)}; all of them by default.",
            autocompletion=listing(names.BENCH_MODELS),
        ),
    ] = "all"
    clippings: Annotated[
        str,
        typer.Option(
            help=f"short (auto-s, auto-s per-layer, dc-e), all, or some of {', '.join(names.BENCH_CLIPPINGS)}.",
            autocompletion=listing(names.BENCH_CLIPPINGS),
        ),
    ] = "short"
    rounds: Annotated[
        int | None,
        typer.Option(help="Timed steps of every way, in turn; more if they are short. Default: 30, with --quick 3."),
    ] = None
    warm_up: Annotated[int, typer.Option(help="Untimed steps of every way before the timed ones.")] = 3
    threads: Annotated[int, typer.Option(help="Threads of torch, the same for every way.")] = 2
    opacus: Annotated[
        bool | None, typer.Option("--opacus/--no-opacus", help="Compare with Opacus. Default: if it is installed.")
    ] = None
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Peak memory of each way, in a process of its own.")
    ] = True
    scaling: Annotated[
        str,
        typer.Option(
            help=f"Growth curves: all, none, or some of {', '.join(names.BENCH_AXES)}.",
            autocompletion=listing(names.BENCH_AXES),
        ),
    ] = "all"
    budget: Annotated[
        float, typer.Option("--seconds-per-way", help="A way slower than this over its rounds stops early.")
    ] = 120.0
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny models and few rounds: for trying out, not for quoting.")
    ] = False
    processes: Annotated[
        int, typer.Option(min=1, help="From 2 on: auto-s against plain DistributedDataParallel, and nothing else.")
    ] = 1
    malloc: Annotated[
        str,
        typer.Option(
            help="Measure with glibc keeping the memory it has (MALLOC_ variables set): off, on, or both in turn.",
            autocompletion=starting(names.MALLOC),
        ),
    ] = "off"


@dataclass(frozen=True)
class ResultsGroup:
    """Where results are kept and shown."""

    out: Annotated[
        Path | None,
        typer.Option(help="Folder with a folder for each machine: bench.json and charts. Default: runs/bench."),
    ] = None
    stored: Annotated[
        Path | None,
        typer.Option("--from", help="Show and draw this result, or all in this folder, instead of measuring."),
    ] = None
    page: Annotated[
        Path | None,
        typer.Option("--readme", help="Also put the speed tables of all machines between the markers of this page."),
    ] = None
