"""`clipless train`: one run from data to files; resumes an interrupted one."""

import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from clipless.accounting import APPROXIMATION_NOTE
from clipless.app import data as data_sets
from clipless.app.cli import _output
from clipless.app.cli._options import AccountantOption, DataFolderOption, JsonOption
from clipless.app.cli._processes import process_group, rank
from clipless.app.cli._progress import training_bar
from clipless.app.cli._signals import stopping
from clipless.app.cli._training_options import (
    AveragingOption,
    BatchSizeOption,
    DataOption,
    DeltaOption,
    EpochsOption,
    EpsilonOption,
    LearningRateOption,
    LrScheduleOption,
    ModelOption,
    MomentumOption,
    NoiseMultiplierOption,
    NoiseOption,
    OptimizerOption,
    UnitGradientsOption,
    WeightDecayOption,
)
from clipless.app.training import TASKS, Result, Saving, TrainingSettings, save_run, saved_about
from clipless.app.training import train as run_training
from clipless.clipping import CLIPPINGS
from clipless.errors import Interrupted, InvalidArgument
from clipless.runs.run_folder import RunFolder

_DEFAULTS = TrainingSettings()


def train(
    context: typer.Context,
    data: DataOption = "digits",
    data_dir: DataFolderOption = None,
    model: ModelOption = _DEFAULTS.model,
    clipping: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(CLIPPINGS)}, with numbers of its own as 'dc-p(percentile=0.3, bins=30)', or none for training "
            "without privacy."
        ),
    ] = _DEFAULTS.clipping,
    epsilon: EpsilonOption = _DEFAULTS.epsilon,
    noise_multiplier: NoiseMultiplierOption = None,
    delta: DeltaOption = _DEFAULTS.delta,
    epochs: EpochsOption = _DEFAULTS.epochs,
    batch_size: BatchSizeOption = _DEFAULTS.batch_size,
    optimizer: OptimizerOption = _DEFAULTS.optimizer,
    lr: LearningRateOption = None,
    lr_schedule: LrScheduleOption = _DEFAULTS.lr_schedule,
    momentum: MomentumOption = None,
    weight_decay: WeightDecayOption = None,
    averaging: AveragingOption = _DEFAULTS.averaging,
    unit_gradients: UnitGradientsOption = False,
    seed: Annotated[
        int | None,
        typer.Option(
            help="For experiments: repeats a run. Whoever knows the seed can subtract the noise. Default: none."
        ),
    ] = None,
    accountant: AccountantOption = _DEFAULTS.accountant,
    noise: NoiseOption = _DEFAULTS.noise,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run's files. Default: runs/DATA-MODEL-CLIPPING.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in --out, with its arguments; begin it if there is none."),
    ] = False,
    reseed: Annotated[
        bool, typer.Option("--reseed", help="With --resume: take new noise; steps after the checkpoint stay counted.")
    ] = False,
    checkpoint_every: Annotated[
        float, typer.Option(min=0, help="Seconds between checkpoints; there is one after every epoch as well.")
    ] = Saving.every,
    as_json: JsonOption = False,
) -> None:
    """Train a model on a data set, test it once an epoch, write run.json and model.pt.

    Without arguments: the digits that come with scikit-learn, automatic clipping, epsilon 3. A private run writes its
    ledger (ledger.jsonl) and a checkpoint as it goes. Ctrl-C finishes the step and saves; --resume continues. Several
    processes train one run together:  torchrun --nproc-per-node=2 -m clipless train ...
    """
    if noise_multiplier is not None and _explicit(context, "epsilon"):
        raise InvalidArgument("--epsilon and --noise-multiplier contradict each other: give one of them.")
    given = _given(context)
    records = data_sets.load(data, data_dir) if out is None else None
    folder = out or Path("runs") / _slug(records.name if records else data, model, clipping)
    if resume and _finished(RunFolder(folder)):
        if rank() == 0:
            _output.show_note(f"The run in {folder} is finished: {RunFolder(folder).record}.")
        return
    about = saved_about(folder) if resume else None
    settings = _completed(given, about, context)
    source = about["source"] if about and about["source"] and not _explicit(context, "data") else data
    records = records or data_sets.load(source, data_dir)
    RunFolder(folder).check_writable()
    saving = Saving(folder, resume, reseed, checkpoint_every, source)
    title = f"{records.name} {settings.model} {settings.clipping}"
    first, metric = rank() == 0, TASKS[records.task].metric
    with process_group(), training_bar(title, visible=first and not as_json, metric=metric) as bar, stopping() as stop:
        try:
            result = run_training(records, settings, on_progress=bar, saving=saving, stop=stop)
        except Interrupted as interrupted:
            if first:
                _output.show_note(str(interrupted))
            raise typer.Exit(stop.exit_code) from None
    if not first:
        return
    written = save_run(result, folder)
    if as_json:
        _output.show_json(_record(result, written))
    else:
        _output.show_table("Run", _summary(result, written))
        for note in _notes(settings):
            _output.show_note(note)


def _given(context: typer.Context) -> TrainingSettings:
    """The settings that have an option of their own name; the rest are the defaults."""
    names = [field.name for field in fields(TrainingSettings) if field.name in context.params]
    return TrainingSettings(**{name: context.params[name] for name in names})


def _slug(*words: str) -> str:
    """A name for a run's folder: 'dc-p(percentile=0.3)' and 'package.module:factory' make no good ones as they are."""
    return re.sub(r"[^\w.=-]+", "-", "-".join(word.replace(":", ".") for word in words)).strip("-")


def _explicit(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _completed(given: TrainingSettings, about: dict[str, Any] | None, context: typer.Context) -> TrainingSettings:
    """The settings of the interrupted run, with what was given on the command line; training refuses a difference."""
    if about is None:
        return given
    names = [field.name for field in fields(given) if _explicit(context, field.name)]
    return replace(TrainingSettings(**about["settings"]), **{name: asdict(given)[name] for name in names})


def _finished(folder: RunFolder) -> bool:
    if not folder.ledger.exists() or folder.unfinished:
        return False
    folder.checkpoint.unlink(missing_ok=True)  # cut off after run.json was written, before the key was removed
    return True


def _record(result: Result, written: Path) -> dict[str, Any]:
    return {
        "private": result.settings.private,
        "data": result.data,
        "metrics": result.metrics(),
        "plan": result.plan,
        "run": str(written),
        "model": str(written.with_name("model.pt")),
        "notes": list(_notes(result.settings)),
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
        f"test {result.metric.replace('_', ' ')}": _output.metric_text(result.metric, result.score),
        **(privacy if settings.private else {"epsilon": "none: this run is not private"}),
        "steps": f"{result.steps} in {settings.epochs} epochs",
        "time": f"{result.seconds:.1f} s",
        "written": f"{written}, {written.with_name('model.pt').name}",
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
