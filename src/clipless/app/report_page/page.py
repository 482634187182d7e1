"""From runs to the page: everything that varies is escaped by the template, but our own drawings and style."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from clipless.app.report import RunReport
from clipless.app.report_page import facts
from clipless.app.report_page.figures import figures
from clipless.app.report_page.promise import promise
from clipless.errors import InvalidArgument
from clipless.runs.durable_files import replace_file

SUFFIXES = (".html", ".htm")
_FOLDER = files("clipless.app.report_page")


def page(runs: Mapping[str, RunReport], delta: float | None = None, accountant: str | None = None) -> str:
    """The page about these runs, by the name each is shown under. The same runs give the same page, byte for byte."""
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(_resource("page.html"))
    return template.render(
        style=Markup(_resource("style.css")),
        runs=[
            _described(number, name, run, delta, accountant) for number, (name, run) in enumerate(runs.items(), start=1)
        ],
        overview=facts.overview(runs, delta, accountant) if len(runs) > 1 else {},
        figures=[(figure, Markup(figure.drawing)) for figure in figures(runs)],
    )


def write_page(
    path: Path, runs: Mapping[str, RunReport], delta: float | None = None, accountant: str | None = None
) -> Path:
    """Write the page, whole or not at all."""
    content = page(runs, delta, accountant).encode(errors="backslashreplace")  # names of files need not be text
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda file: file.write(content))
    except OSError as error:
        raise InvalidArgument(f"cannot write {path} ({error}). Choose another file.") from error
    return path


def named(readings: list[RunReport]) -> dict[str, RunReport]:
    """The runs by their folders' names; by their whole paths where two are the same."""
    short = [(run.path if run.path.is_dir() else run.path.with_suffix("")).resolve().name for run in readings]
    if len(set(short)) < len(short):
        short = [str(run.path) for run in readings]
    if len(set(short)) < len(short):
        raise InvalidArgument("a run is given twice: give each once.")
    return dict(zip(short, readings, strict=True))


def checked_path(path: Path) -> Path:
    """The path, if it is that of a page: a ledger given by mistake must not be overwritten."""
    if path.suffix not in SUFFIXES:
        raise InvalidArgument(f"cannot write the page to {path.name!r}: end its name in .html.")
    return path


def _described(number: int, name: str, run: RunReport, delta: float | None, accountant: str | None) -> dict[str, Any]:
    spent = facts.stated(run, delta, accountant) if run.private else None
    return {
        "id": f"run-{number}",
        "name": name,
        "warnings": facts.warnings(run),
        "promise": promise(run, spent) if spent else {},
        "tables": {
            "Privacy": facts.privacy(run, delta, accountant),
            "Results": facts.results(run),
            "Configuration": facts.configuration(run),
            "Ledger": facts.ledger(run),
            "Versions": facts.versions(run),
        },
        "not_private": run.not_private(),
    }


def _resource(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
