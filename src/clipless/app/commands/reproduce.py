"""The body of `clipless reproduce`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile

import typer

from clipless.app.options.reproduce import ExperimentGroup
from clipless.app.progress import OnProgress
from clipless.app.reproduce import REPRODUCTIONS, ReproductionRequest, reproduction, reproductions
from clipless.app.reproduce.result import ReproductionResult
from clipless.app.terminal import output
from clipless.app.terminal.progress import progress_bar
from clipless.arguments import named
from clipless.errors import InvalidArgument
from clipless.runs.run_folder import RunFolder

KINDS = {"png": "png", "svg": "svg", "pdf": "pdf"}


def run(name: str | None, asked: ExperimentGroup, *, as_json: bool) -> None:
    """Reproduce one thing into its folder, and show it."""
    if name is None:
        raise InvalidArgument(f"nothing to reproduce: give one of {', '.join(REPRODUCTIONS)}, a TOML file, or --list.")
    found = reproduction(name)
    name = Path(name).stem
    named("format", asked.kind, KINDS)
    folder = asked.out or Path("runs/reproduce") / (f"{name}-quick" if asked.quick else name)
    RunFolder(folder).check_writable()
    with _progress(visible=not as_json) as report:
        result = found.run(
            ReproductionRequest(
                folder=folder,
                kind=asked.kind,
                on_progress=report,
                seeds=asked.seeds,
                quick=asked.quick,
                workers=asked.workers,
                data_dir=asked.data_dir,
                stored=asked.stored,
                rows=tuple(asked.row or ()),
                store=asked.store,
            )
        )
    if asked.store is not None and not asked.quick and (folder / "results.json").exists():
        asked.store.mkdir(parents=True, exist_ok=True)
        copyfile(folder / "results.json", asked.store / f"{name}.json")
    _show(name, result, as_json)


@contextmanager
def _progress(*, visible: bool) -> Iterator[OnProgress]:
    with progress_bar("{task.completed:.0f}/{task.total:.0f}", visible=visible, on_terminal_only=True) as bar:
        task = bar.add_task("starting", total=1)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def show_list(as_json: bool) -> None:
    """Show everything that can be reproduced."""
    found = {name: each.what for name, each in reproductions().items()}
    if as_json:
        output.show_json(found)
    else:
        output.show_table("What can be reproduced", found)


def write_pages(store: Path | None, page: Path, readme: Path | None, as_json: bool) -> None:
    """Write the page of all stored results, and the table of the README."""
    from clipless.app.reproduce.results_page import write_page, write_readme

    folder = store or Path("experiments/results")
    shown = write_page(folder, page)
    if readme is not None:
        write_readme(folder, readme)
    if as_json:
        output.show_json({"page": str(page), "ids": shown})
    else:
        typer.echo(f"written: {page} ({', '.join(shown)})")


def _show(name: str, result: ReproductionResult, as_json: bool) -> None:
    if as_json:
        figures = [{"file": file, "shows": sentence} for file, sentence in result.figures.items()]
        output.show_json({"id": name, "page": str(result.page), "figures": figures})
        return
    if result.page.suffix == ".md":
        typer.echo(result.page.read_text(encoding="utf-8"))
    output.show_table(f"{len(result.figures)} figures", {Path(file).name: s for file, s in result.figures.items()})
    typer.echo(f"written: {result.page}")
