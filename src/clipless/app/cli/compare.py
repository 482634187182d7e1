"""`clipless compare`: several clippings, and no privacy, at one budget over repeated runs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clipless.app import charts, comparing
from clipless.app.charts import drawing
from clipless.app.cli import _output
from clipless.app.cli._config import ConfigOption, config_columns
from clipless.app.cli._data_options import DataGroup
from clipless.app.cli._options import JsonOption
from clipless.app.cli._progress import PERCENT, progress_bar
from clipless.app.cli._signals import stopping
from clipless.app.cli._training_options import (
    DEFAULTS,
    PRIVACY_PANEL,
    BudgetGroup,
    LossOption,
    ModelOption,
    RefinementGroup,
    StepsGroup,
    settings_of,
)
from clipless.app.clippings import split
from clipless.app.comparing import MAY_DIFFER, Compared
from clipless.errors import Interrupted, InvalidArgument
from clipless.runs.run_folder import RunFolder


def compare(
    context: typer.Context,
    data: DataGroup,
    budget: BudgetGroup,
    steps: StepsGroup,
    refinements: RefinementGroup,
    clippings: Annotated[
        str,
        typer.Option(
            help="What is compared, with commas between; none is training without privacy.",
            rich_help_panel=PRIVACY_PANEL,
        ),
    ] = "auto-s,abadi,dc-p,none",
    repeats: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each, with randomness of their own.")] = 3,
    config: ConfigOption = None,
    model: ModelOption = DEFAULTS.model,
    loss: LossOption = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Repeats a comparison, for experiments: such runs are not private. Default: none."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs, table and figure.")] = Path("runs/compare"),
    kind: Annotated[str, typer.Option("--format", help="Kind of the figure: png, svg or pdf.")] = "svg",
    as_json: JsonOption = False,
) -> None:
    """Train several clippings, and without privacy, at one budget over seeds: one table, one figure, and which to take.

    Runs are stored as they end: the same command goes on where it was interrupted. More seeds and clippings can be added
    later.
    """
    settings = settings_of(budget, steps, refinements, model=model, loss=loss, seed=seed, test_every=steps.epochs)
    names = split(clippings)
    if not names:
        raise InvalidArgument("there is nothing to compare: give --clippings auto-s,abadi,none.")
    picture = drawing.drawable(out / f"compare.{kind}")
    charts.figure()  # refuses before the work if nothing can be drawn
    records = data.load(**config_columns(context))
    RunFolder(out).check_writable()
    bar = progress_bar(PERCENT, visible=not as_json, on_terminal_only=True)
    with bar, stopping() as stop:
        task = bar.add_task("starting", total=1)
        try:
            found = comparing.compare(
                records,
                settings,
                names,
                repeats,
                out,
                lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
                stop,
            )
        except Interrupted:
            _output.show_warning("Stopped. The runs that ended are stored: the same command goes on from there.")
            raise typer.Exit(stop.exit_code) from None
    _finish(found, out, picture, f"{records.name}, {model}, epsilon {budget.epsilon:g}", as_json, records.notes)


def _finish(
    found: list[Compared], out: Path, picture: Path, title: str, as_json: bool, about_data: Sequence[str]
) -> None:
    price = comparing.cost(out)
    advice = comparing.advice(found)
    notes = [*about_data, MAY_DIFFER, *comparing.price_text(price)]
    record = {
        "clippings": [one.to_dict() for one in found],
        "advice": advice,
        "notes": notes,
        "cost_if_private": asdict(price),
        "not_private": {"clippings.*.scores": "computed from the test records, which the guarantee does not cover"},
        "figure": str(_draw(found, picture, title)),
    }
    (out / "compare.json").write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        _output.show_json(record)
        return
    Console().print(_table(found, title))
    typer.echo(advice)
    typer.echo(f"written: {picture}, {out / 'compare.json'}")
    for note in notes:
        _output.show_note(note)


def _words(one: Compared) -> str:
    return one.metric.replace("_", " ") + (", %" if one.metric.endswith("accuracy") else "")


def _table(found: list[Compared], title: str) -> Table:
    table = Table(title=Text(title), title_justify="left")
    for column in ("clipping", f"test {_words(found[0])} (not private)", "runs", "epsilon of one run", "seconds"):
        table.add_column(column)
    for one in sorted(found, key=lambda one: -one.merit):
        spent = "no privacy" if one.epsilon is None else _output.short(one.epsilon)
        table.add_row(one.clipping, one.text, str(len(one.scores)), spent, f"{one.seconds:.1f}")
    return table


def _draw(found: list[Compared], path: Path, title: str) -> Path:
    """A point with its 95 % interval for every clipping, and the runs behind it."""
    figure, (axes,) = charts.figure()
    scale = 100.0 if found[0].metric.endswith("accuracy") else 1.0
    style: dict[str, Any] = {"color": drawing.COLOURS[0]}
    for place, one in enumerate(found):
        half = None if one.interval is None else scale * one.interval
        axes.errorbar(scale * one.mean, place, xerr=half, fmt="o", capsize=4, **style)
        axes.plot([scale * score for score in one.scores], [place] * len(one.scores), "|", alpha=0.5, **style)
    axes.set_yticks(range(len(found)), [one.clipping for one in found])
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.15)
    axes.set_title(f"{title}: mean and 95 % interval of {len(found[0].scores)} runs", fontsize=10)
    axes.set_xlabel(f"test {_words(found[0])} (not private)", fontsize=9)
    axes.grid(True, color="0.88", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return charts.save(figure, path)
