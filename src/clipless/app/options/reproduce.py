"""Options of `clipless reproduce`."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from clipless.app.options.common import DataFolderOption
from clipless.app.reproduce import REPRODUCTIONS


def reproduction_names(incomplete: str = "") -> list[str]:
    """The ids that begin so. An experiment's is the name of its file."""
    folder = files("clipless.app.reproduce") / "configurations"
    experiments = sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    return [name for name in (*REPRODUCTIONS, *experiments) if name.startswith(incomplete)]


@dataclass(frozen=True)
class ExperimentGroup:
    """How an experiment is run."""

    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of every setting. Default: the experiment's.")] = None
    quick: Annotated[bool, typer.Option("--quick", help="A smaller experiment, to see that it works.")] = False
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, each with one thread if there are several.")] = 1
    data_dir: DataFolderOption = None
    out: Annotated[
        Path | None, typer.Option(help="Folder for runs, table and figures. Default: runs/reproduce/ID.")
    ] = None
    kind: Annotated[str, typer.Option("--format", help="Kind of the pictures: png, svg or pdf.")] = "png"
    stored: Annotated[
        bool, typer.Option("--stored", help="Train nothing: table and figures of the runs that are stored in --out.")
    ] = False
    store: Annotated[
        Path | None, typer.Option(help="Folder in which the results are kept as ID.json; runs in it are not run again.")
    ] = None
    row: Annotated[
        list[str] | None, typer.Option(help="Run only this row of the table; may be given several times.")
    ] = None


@dataclass(frozen=True)
class PagesGroup:
    """Pages of stored results."""

    page: Annotated[Path | None, typer.Option(help="Write this page of all results in --store, and stop.")] = None
    readme: Annotated[Path | None, typer.Option(help="With --page: also the table between the README's markers.")] = (
        None
    )
