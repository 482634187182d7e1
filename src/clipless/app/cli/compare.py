"""`clipless compare`: several clippings, and no privacy, at one budget over repeated runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from clipless.app import charts, comparing
from clipless.app import data as data_sets
from clipless.app.charts import drawing
from clipless.app.cli import _output
from clipless.app.cli._options import AccountantOption, DataFolderOption, JsonOption
from clipless.app.cli._progress import PERCENT, progress_bar
from clipless.app.cli._signals import stopping
from clipless.app.cli._training_options import (
    BatchSizeOption,
    DataOption,
    DeltaOption,
    EpochsOption,
    EpsilonOption,
    LearningRateOption,
    LrScheduleOption,
    ModelOption,
    MomentumOption,
    OptimizerOption,
    UnitGradientsOption,
    WeightDecayOption,
)
from clipless.app.clippings import split
from clipless.app.comparing import MAY_DIFFER, Compared
from clipless.app.training import TrainingSettings
from clipless.errors import Interrupted, InvalidArgument
from clipless.runs.run_folder import RunFolder

_DEFAULTS = TrainingSettings()


def compare(
    clippings: Annotated[
        str, typer.Option(help="What is compared, with commas between; none is training without privacy.")
    ] = "auto-s,abadi,dc-p,none",
    repeats: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each, with randomness of their own.")] = 3,
    data: DataOption = "digits",
    data_dir: DataFolderOption = None,
    model: ModelOption = _DEFAULTS.model,
    epsilon: EpsilonOption = _DEFAULTS.epsilon,
    delta: DeltaOption = _DEFAULTS.delta,
    epochs: EpochsOption = _DEFAULTS.epochs,
    batch_size: BatchSizeOption = _DEFAULTS.batch_size,
    optimizer: OptimizerOption = _DEFAULTS.optimizer,
    lr: LearningRateOption = None,
    lr_schedule: LrScheduleOption = _DEFAULTS.lr_schedule,
    momentum: MomentumOption = None,
    weight_decay: WeightDecayOption = None,
    unit_gradients: UnitGradientsOption = False,
    accountant: AccountantOption = _DEFAULTS.accountant,
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
    settings = TrainingSettings(
        model=model,
        epsilon=epsilon,
        delta=delta,
        epochs=epochs,
        batch_size=batch_size,
        optimizer=optimizer,
        lr=lr,
        lr_schedule=lr_schedule,
        momentum=momentum,
        weight_decay=weight_decay,
        unit_gradients=unit_gradients,
        accountant=accountant,
        seed=seed,
        test_every=epochs,
    )
    names = split(clippings)
    if not names:
        raise InvalidArgument("there is nothing to compare: give --clippings auto-s,abadi,none.")
    picture = drawing.drawable(out / f"compare.{kind}")
    charts.figure()  # refuses before the work if nothing can be drawn
    records = data_sets.load(data, data_dir)
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
            _output.show_note("Stopped. The runs that ended are stored: the same command goes on from there.")
            raise typer.Exit(stop.exit_code) from None
    _finish(found, out, picture, f"{records.name}, {model}, epsilon {epsilon:g}", as_json)


def _finish(found: list[Compared], out: Path, picture: Path, title: str, as_json: bool) -> None:
    price = comparing.cost(out)
    advice = comparing.advice(found)
    notes = [MAY_DIFFER, *comparing.price_text(price)]
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
    table = Table(title=title, title_justify="left")
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
