"""`clipless reproduce`: figures and tables of the papers, reproduced."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile
from typing import Annotated

import typer

from clipless.app.cli import _output
from clipless.app.cli._options import DataFolderOption, JsonOption
from clipless.app.cli._progress import progress_bar
from clipless.app.progress import OnProgress
from clipless.app.reproduce import REPRODUCTIONS, ReproductionRequest, reproductions
from clipless.app.reproduce.result import ReproductionResult
from clipless.arguments import named
from clipless.errors import InvalidArgument
from clipless.runs.run_folder import RunFolder

KINDS = {"png": "png", "svg": "svg", "pdf": "pdf"}


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="ID", help="What to reproduce; --list shows all.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show what can be reproduced, and stop.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of every setting. Default: the experiment's.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller experiment, to see that it works.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, each with one thread if there are several.")] = 1,
    data_dir: DataFolderOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for runs, table and figures. Default: runs/reproduce/ID.")
    ] = None,
    kind: Annotated[str, typer.Option("--format", help="Kind of the pictures: png or svg.")] = "png",
    stored: Annotated[
        bool, typer.Option("--stored", help="Train nothing: table and figures of the runs that are stored in --out.")
    ] = False,
    store: Annotated[Path | None, typer.Option(help="Folder in which the results are kept as ID.json.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write this page of all results in --store, and stop.")] = None,
    readme: Annotated[
        Path | None, typer.Option(help="With --page: also the table between the README's markers.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Reproduce a paper's figures and tables beside the published numbers, in one folder.

    Runs are stored as they end: the same command continues where it was interrupted. Nothing is downloaded; a missing data
    set is named, with how to get it.
    """
    if listed:
        _show_list(as_json)
        return
    if page is not None:
        _write_pages(store, page, readme, as_json)
        return
    if name is None:
        raise InvalidArgument(f"nothing to reproduce: give one of {', '.join(REPRODUCTIONS)}, or --list.")
    reproduction = named("id", name, reproductions())
    named("format", kind, KINDS)
    folder = out or Path("runs/reproduce") / (f"{name}-quick" if quick else name)
    RunFolder(folder).check_writable()
    with _progress(visible=not as_json) as report:
        result = reproduction.run(ReproductionRequest(folder, kind, report, seeds, quick, workers, data_dir, stored))
    if store is not None and not quick and (folder / "results.json").exists():
        store.mkdir(parents=True, exist_ok=True)
        copyfile(folder / "results.json", store / f"{name}.json")
    _show(name, result, as_json)


@contextmanager
def _progress(*, visible: bool) -> Iterator[OnProgress]:
    with progress_bar("{task.completed:.0f}/{task.total:.0f}", visible=visible, on_terminal_only=True) as bar:
        task = bar.add_task("starting", total=1)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _show_list(as_json: bool) -> None:
    found = {name: each.what for name, each in reproductions().items()}
    if as_json:
        _output.show_json(found)
    else:
        _output.show_table("What can be reproduced", found)


def _write_pages(store: Path | None, page: Path, readme: Path | None, as_json: bool) -> None:
    from clipless.app.reproduce.results_page import write_page, write_readme

    folder = store or Path("experiments/results")
    shown = write_page(folder, page)
    if readme is not None:
        write_readme(folder, readme)
    if as_json:
        _output.show_json({"page": str(page), "ids": shown})
    else:
        typer.echo(f"written: {page} ({', '.join(shown)})")


def _show(name: str, result: ReproductionResult, as_json: bool) -> None:
    if as_json:
        figures = [{"file": file, "shows": sentence} for file, sentence in result.figures.items()]
        _output.show_json({"id": name, "page": str(result.page), "figures": figures})
        return
    if result.page.suffix == ".md":
        typer.echo(result.page.read_text(encoding="utf-8"))
    _output.show_table(f"{len(result.figures)} figures", {Path(file).name: s for file, s in result.figures.items()})
    typer.echo(f"written: {result.page}")
