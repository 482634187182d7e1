"""`clipless train`: one run from data to files; resumes an interrupted one."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from clipless.accounting import APPROXIMATION_NOTE
from clipless.app.cli import _output
from clipless.app.cli._begin import BegunRun, FilesGroup, chosen_multiplier
from clipless.app.cli._config import ConfigOption
from clipless.app.cli._data_options import DataGroup
from clipless.app.cli._options import JsonOption
from clipless.app.cli._processes import process_group, rank
from clipless.app.cli._progress import training_bar
from clipless.app.cli._signals import Stop, stopping
from clipless.app.cli._training_options import (
    DEFAULTS,
    AveragingOption,
    BudgetGroup,
    LossOption,
    ModelOption,
    NoiseMultiplierOption,
    NoiseOption,
    RefinementGroup,
    StepsGroup,
    TrainClippingOption,
    settings_of,
)
from clipless.app.data import Data
from clipless.app.training import TASKS, Board, Result, Saving, TrainingProgress, TrainingSettings, save_run
from clipless.app.training import train as run_training
from clipless.errors import Interrupted
from clipless.runs.run_folder import RunFolder


def train(
    context: typer.Context,
    data: DataGroup,
    budget: BudgetGroup,
    steps: StepsGroup,
    refinements: RefinementGroup,
    files: FilesGroup,
    config: ConfigOption = None,
    model: ModelOption = DEFAULTS.model,
    loss: LossOption = None,
    clipping: TrainClippingOption = DEFAULTS.clipping,
    noise_multiplier: NoiseMultiplierOption = None,
    averaging: AveragingOption = DEFAULTS.averaging,
    seed: Annotated[
        int | None,
        typer.Option(
            help="For experiments: repeats a run. Whoever knows the seed can subtract the noise. Default: none."
        ),
    ] = None,
    noise: NoiseOption = DEFAULTS.noise,
    as_json: JsonOption = False,
) -> None:
    """Train a model on a data set, test it once an epoch, write run.json and model.pt.

    Without arguments: the digits that come with scikit-learn, automatic clipping, epsilon 3. A private run writes its
    ledger (ledger.jsonl) and a checkpoint as it goes. Ctrl-C finishes the step and saves; --resume continues. Tables of
    your own: docs/own_data.md. Several processes train one run:  torchrun --nproc-per-node=2 -m clipless train ...
    """
    given = settings_of(
        budget,
        steps,
        refinements,
        model=model,
        loss=loss,
        clipping=clipping,
        noise_multiplier=chosen_multiplier(context, noise_multiplier),
        averaging=averaging,
        seed=seed,
        noise=noise,
    )
    begun = BegunRun.of(context, data, given, files)
    if begun is None:
        return
    folder, settings = begun.folder, begun.settings
    RunFolder(folder).check_writable()
    saving = Saving(folder, files.resume, files.reseed, files.checkpoint_every, begun.data.data, begun.config)
    result = _trained(begun, saving, files.tensorboard, visible=not as_json)
    if rank() != 0:
        return
    written = save_run(result, folder, begun.config)
    notes = [*begun.records.notes, *_notes(settings)]
    if as_json:
        _output.show_json(_record(result, written, notes))
    else:
        _output.show_table("Run", _summary(result, written))
        for note in notes:
            _output.show_note(note)


def _trained(begun: BegunRun, saving: Saving, board: Path | None, *, visible: bool) -> Result:
    records, settings = begun.records, begun.settings
    title = f"{records.name} {settings.model} {settings.clipping}"
    first, metric = rank() == 0, TASKS[records.task].metric
    with ExitStack() as stack:
        stack.enter_context(process_group())
        bar = stack.enter_context(training_bar(title, visible=first and visible, metric=metric))
        written = stack.enter_context(Board(board, settings, metric)) if board and first else None
        stop = stack.enter_context(stopping())
        return _until_stopped(records, settings, saving, stop, bar if written is None else _both(bar, written))


def _until_stopped(
    records: Data, settings: TrainingSettings, saving: Saving, stop: Stop, report: Callable[[TrainingProgress], None]
) -> Result:
    try:
        return run_training(records, settings, on_progress=report, saving=saving, stop=stop)
    except Interrupted as interrupted:
        if rank() == 0:
            _output.show_warning(str(interrupted))
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
        "epsilon": f"{_output.short(result.epsilon)} ({settings.accountant})",
        "delta": _output.short(result.delta),
    }
    return {
        "data": result.data,
        "model": f"{settings.model}, {result.metrics()['parameters']:,} parameters",
        "clipping": settings.clipping,
        f"test {result.metric.replace('_', ' ')} (not private)": _output.metric_text(result.metric, result.score),
        **(privacy if settings.private else {"epsilon": "none: this run is not private"}),
        "steps": f"{result.steps} in {settings.epochs} epochs",
        "time": f"{result.seconds:.1f} s",
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
