"""`clipless reproduce`: figures and tables of the papers, made again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from clipless.app.cli import _output
from clipless.app.cli._options import JsonOption
from clipless.app.cli._progress import progress_bar
from clipless.app.progress import OnProgress
from clipless.app.reproduce import REPRODUCTIONS
from clipless.app.reproduce.result import ReproductionResult
from clipless.arguments import named
from clipless.errors import InvalidArgument
from clipless.runs.run_folder import RunFolder

KINDS = {"png": "png", "svg": "svg", "pdf": "pdf"}


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="ID", help="What to reproduce; --list shows all.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show what can be reproduced, and stop.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for figures and page. Default: runs/reproduce/ID.")] = None,
    kind: Annotated[str, typer.Option("--format", help="Kind of the pictures: png or svg.")] = "png",
    as_json: JsonOption = False,
) -> None:
    """Make a paper's figures again, into one folder with a page that shows them side by side."""
    if listed:
        _show_list(as_json)
        return
    if name is None:
        raise InvalidArgument(f"nothing to reproduce: give one of {', '.join(REPRODUCTIONS)}, or --list.")
    reproduction = named("id", name, REPRODUCTIONS)
    named("format", kind, KINDS)
    folder = out or Path("runs/reproduce") / name
    RunFolder(folder).check_writable()
    with _progress(visible=not as_json) as report:
        result = reproduction.run(folder, kind, report)
    _show(name, result, as_json)


@contextmanager
def _progress(*, visible: bool) -> Iterator[OnProgress]:
    with progress_bar("{task.completed}/{task.total}", visible=visible, on_terminal_only=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _show_list(as_json: bool) -> None:
    found = {name: each.what for name, each in REPRODUCTIONS.items()}
    if as_json:
        _output.show_json(found)
    else:
        _output.show_table("What can be reproduced", found)


def _show(name: str, result: ReproductionResult, as_json: bool) -> None:
    if as_json:
        figures = [{"file": file, "shows": sentence} for file, sentence in result.figures.items()]
        _output.show_json({"id": name, "page": str(result.page), "figures": figures})
        return
    _output.show_table(f"{len(result.figures)} figures", {Path(file).name: s for file, s in result.figures.items()})
    typer.echo(f"written: {result.page}")
