"""The body of `clipless compare`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from clipless.app import charts, comparing
from clipless.app.charts import drawing
from clipless.app.clippings import split
from clipless.app.commands.chosen_data import load_data, own_data
from clipless.app.commands.effective_config import config_text, run_options
from clipless.app.comparing import MAY_DIFFER, Compared
from clipless.app.options.data import DataGroup
from clipless.app.settings import TrainingSettings
from clipless.app.terminal import output
from clipless.app.terminal.output import Console
from clipless.app.terminal.progress import PERCENT, progress_bar
from clipless.app.terminal.signals import stopping
from clipless.app.training.result import DURATION, TEST_RECORDS
from clipless.errors import Interrupted, InvalidArgument
from clipless.runs.run_folder import RunFolder

# Settings of a run that a comparison has no option for.
NOT_OPTIONS = ("clipping", "noise", "noise_multiplier", "averaging")


def run(
    data: DataGroup,
    columns: Mapping[str, Any],
    settings: TrainingSettings,
    clippings: str,
    repeats: int,
    *,
    out: Path,
    kind: str,
    as_json: bool,
) -> None:
    """Train, save and show a comparison. `columns` are rules from a configuration file."""
    names = split(clippings)
    if not names:
        raise InvalidArgument("there is nothing to compare: give --clippings auto-s,abadi,none.")
    picture = drawing.drawable(out / f"compare.{kind}")
    charts.figure()  # refuses before the work if nothing can be drawn
    records = load_data(data, **columns)
    chosen = {name: value for name, value in run_options(settings).items() if name not in NOT_OPTIONS}
    options = {"clippings": clippings, "seeds": repeats, **chosen}
    text = config_text("compare", data, own_data(data, **columns), options)
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
            output.show_warning("Stopped. The runs that ended are stored: the same command continues from there.")
            raise typer.Exit(stop.exit_code) from None
    RunFolder(out).config.write_text(text, encoding="utf-8")
    title = f"{records.name}, {settings.model}, epsilon {settings.epsilon:g}"
    _finish(found, out, picture, title, as_json, records.notes)


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
        "not_private": {"clippings.*.scores": TEST_RECORDS, "clippings.*.seconds": DURATION},
        "figure": str(_draw(found, picture, title)),
    }
    (out / "compare.json").write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        output.show_json(record)
        return
    Console().print(_table(found, title))
    typer.echo(advice)
    typer.echo(f"written: {picture}, {out / 'compare.json'}, config.toml")
    for note in notes:
        output.show_note(note)


def _words(one: Compared) -> str:
    return one.metric.replace("_", " ") + (", %" if one.metric.endswith("accuracy") else "")


def _table(found: list[Compared], title: str) -> Table:
    table = Table(title=Text(title), title_justify="left")
    for column in (
        "clipping",
        f"test {_words(found[0])} (not private)",
        "runs",
        "epsilon of one run",
        "seconds (not private)",
    ):
        table.add_column(column, overflow="fold")
    for one in sorted(found, key=lambda one: -one.merit):
        spent = "no privacy" if one.epsilon is None else output.short(one.epsilon)
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
