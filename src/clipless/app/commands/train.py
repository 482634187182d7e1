"""The body of `clipless train`."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import typer

from clipless.accounting import APPROXIMATION_NOTE
from clipless.app.commands.begin import BegunRun
from clipless.app.data import Data
from clipless.app.options.data import DataGroup
from clipless.app.options.files import FilesGroup
from clipless.app.report import read_run
from clipless.app.settings import TrainingSettings
from clipless.app.terminal import output
from clipless.app.terminal.progress import training_bar
from clipless.app.terminal.signals import Stop, stopping
from clipless.app.terminal.streams import showing_run, unfailing
from clipless.app.torchrun import process_group, rank
from clipless.app.training import TASKS, Board, Result, Saving, TrainingProgress, save_run
from clipless.app.training import train as run_training
from clipless.errors import Interrupted
from clipless.runs.run_folder import RunFolder


def run(
    data: DataGroup,
    given: TrainingSettings,
    files: FilesGroup,
    columns: Mapping[str, Any],
    explicit: frozenset[str],
    *,
    as_json: bool,
) -> None:
    """Train, save and show a run. `columns` are rules from a configuration file, `explicit` the options that were given,
    which a resumed run must agree with."""
    begun = BegunRun.of(data, given, files, columns, explicit)
    if isinstance(begun, RunFolder):
        _show_finished(begun, as_json=as_json)
        return
    folder, settings = begun.folder, begun.settings
    RunFolder(folder).check_writable()
    saving = Saving(folder, files.resume, files.reseed, files.checkpoint_every, begun.data.data, begun.config)
    result = _trained(begun, saving, files.tensorboard, visible=not as_json)
    if rank() != 0:
        return
    written, notes = RunFolder(folder).record, [*begun.records.notes, *_notes(settings)]
    with showing_run(folder):
        if as_json:
            output.show_json(_record(result, written, notes))
        else:
            output.show_table("Run", _summary(result, written))
            for note in notes:
                output.show_note(note)


def _show_finished(folder: RunFolder, *, as_json: bool) -> None:
    """The run that was to be resumed is finished already."""
    note = f"The run in {folder.path} is finished: {folder.record}."
    if rank() != 0:
        return
    output.show_warning(note)
    if as_json:
        record = read_run(folder.path).record  # or raises: what it says is not what its ledger says
        kept = {name: record.get(name) for name in ("private", "data", "metrics", "plan")}
        files = {"run": str(folder.record), "model": str(folder.model), "config": str(folder.config)}
        output.show_json({**kept, **files, "notes": [note]})


def _trained(begun: BegunRun, saving: Saving, board: Path | None, *, visible: bool) -> Result:
    """Train, and save the run before anything else can fail."""
    records, settings = begun.records, begun.settings
    title = f"{records.name} {settings.model} {settings.clipping}"
    first, metric = rank() == 0, TASKS[records.task].metric
    with ExitStack() as stack:
        stack.enter_context(process_group())
        bar = stack.enter_context(training_bar(title, visible=first and visible, metric=metric))
        written = stack.enter_context(Board(board, settings, metric)) if board and first else None
        stop = stack.enter_context(stopping())
        report = unfailing(bar) if written is None else _both(unfailing(bar), unfailing(written))
        result = _until_stopped(records, settings, saving, stop, report)
        if first:
            save_run(result, begun.folder, begun.config)
        return result


def _until_stopped(
    records: Data, settings: TrainingSettings, saving: Saving, stop: Stop, report: Callable[[TrainingProgress], None]
) -> Result:
    try:
        return run_training(records, settings, on_progress=report, saving=saving, stop=stop)
    except Interrupted as interrupted:
        if rank() == 0:
            output.show_warning(str(interrupted))
        raise typer.Exit(stop.exit_code) from None


def _both(
    one: Callable[[TrainingProgress], None], other: Callable[[TrainingProgress], None]
) -> Callable[[TrainingProgress], None]:
    def report(progress: TrainingProgress) -> None:
        one(progress)
        other(progress)

    return report


def _record(result: Result, written: Path, notes: list[str]) -> dict[str, Any]:
    return {
        "private": result.settings.private,
        "data": result.data,
        "metrics": result.metrics(),
        "plan": result.plan,
        "run": str(written),
        "model": str(written.with_name("model.pt")),
        "config": str(written.with_name("config.toml")),
        "notes": notes,
    }


def _summary(result: Result, written: Path) -> dict[str, str]:
    settings = result.settings
    privacy = {
        "epsilon": f"{output.short(result.epsilon)} ({settings.accountant})",
        "delta": output.short(result.delta),
    }
    return {
        "data": result.data,
        "model": f"{settings.model}, {result.metrics()['parameters']:,} parameters",
        "clipping": settings.clipping,
        f"test {result.metric.replace('_', ' ')} (not private)": output.metric_text(result.metric, result.score),
        **(privacy if settings.private else {"epsilon": "none: this run is not private"}),
        "steps": f"{result.steps} in {settings.epochs} {'epoch' if settings.epochs == 1 else 'epochs'}",
        "time (not private)": f"{result.seconds:.1f} s",
        "written": f"{written}, model.pt, config.toml",
    }


def _notes(settings: TrainingSettings) -> list[str]:
    notes: list[str] = []
    if not settings.private:
        notes.append("clipping none: this run has no privacy guarantee.")
    elif settings.accountant == "gdp":
        notes.append(APPROXIMATION_NOTE)
    if settings.private and settings.seed is not None:
        notes.append("The seed is fixed: whoever knows it can subtract the noise. Release runs without --seed only.")
    return notes
