"""`clipless train`: one run from data to files; resumes an interrupted one."""

import re
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from clipless.accounting import APPROXIMATION_NOTE
from clipless.app.cli import _output
from clipless.app.cli._config import ConfigOption, config_columns, config_text
from clipless.app.cli._data_options import SCHEMA_KEYS, DataGroup
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
from clipless.app.training import (
    TASKS,
    Board,
    Result,
    Saving,
    TrainingProgress,
    TrainingSettings,
    save_run,
    saved_about,
)
from clipless.app.training import train as run_training
from clipless.errors import Interrupted, InvalidArgument
from clipless.runs.run_folder import RunFolder

FILES_PANEL = "Files"


@dataclass(frozen=True)
class FilesGroup:
    """Where the run is kept, and whether it goes on."""

    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the run's files. Default: runs/DATA-MODEL-CLIPPING.", rich_help_panel=FILES_PANEL
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in --out, with its arguments; begin it if there is none.",
            rich_help_panel=FILES_PANEL,
        ),
    ] = False
    reseed: Annotated[
        bool,
        typer.Option(
            "--reseed",
            help="With --resume: take new noise; steps after the checkpoint stay counted.",
            rich_help_panel=FILES_PANEL,
        ),
    ] = False
    checkpoint_every: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds between checkpoints; there is one after every epoch as well.",
            rich_help_panel=FILES_PANEL,
        ),
    ] = Saving.every
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            help="Also write TensorBoard files to this folder, with tags private/... and not_private/...",
            rich_help_panel=FILES_PANEL,
        ),
    ] = None


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
        noise_multiplier=_multiplier(context, noise_multiplier),
        averaging=averaging,
        seed=seed,
        noise=noise,
    )
    begun = _Begun.of(context, data, given, files)
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


@dataclass(frozen=True)
class _Begun:
    """A run before its first step, new or resumed."""

    data: DataGroup
    records: Data
    settings: TrainingSettings
    folder: Path
    config: str

    @classmethod
    def of(cls, context: typer.Context, data: DataGroup, given: TrainingSettings, files: FilesGroup) -> "_Begun | None":
        """None if the run is finished already."""
        columns = config_columns(context)
        records = data.load(**columns) if files.out is None else None
        name = records.name if records else data.data
        folder = files.out or Path("runs") / _slug(name, given.model, given.clipping)
        if files.resume and _finished(RunFolder(folder)):
            if rank() == 0:
                _output.show_warning(f"The run in {folder} is finished: {RunFolder(folder).record}.")
            return None
        about = saved_about(folder) if files.resume else None
        if about is not None:
            data, columns = _completed_data(context, data, columns, about, folder)
            records = None
        settings = _completed(given, about, context)
        records = records or data.load(**columns)
        return cls(data, records, settings, folder, config_text(data, data.own(**columns), settings))


def _trained(begun: _Begun, saving: Saving, board: Path | None, *, visible: bool) -> Result:
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
    except Exception:
        if rank() == 0:
            RunFolder(saving.out).discard_unstarted()  # or the corrected command would be told to resume it
        raise


def _both(
    one: Callable[[TrainingProgress], None], other: Callable[[TrainingProgress], None]
) -> Callable[[TrainingProgress], None]:
    def report(progress: TrainingProgress) -> None:
        one(progress)
        other(progress)

    return report


def _slug(*words: str) -> str:
    """A name for a run's folder: 'dc-p(percentile=0.3)' and 'package.module:factory' make no good ones as they are."""
    return re.sub(r"[^\w.=-]+", "-", "-".join(word.replace(":", ".") for word in words)).strip("-")


def _explicit(context: typer.Context, name: str) -> bool:
    """Whether an option was given, on the command line or in the configuration file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")


def _multiplier(context: typer.Context, given: float | None) -> float | None:
    """The noise multiplier, unless an epsilon on the command line wins over that of the configuration file."""
    sources = [context.get_parameter_source(name) for name in ("epsilon", "noise_multiplier")]
    budget, noise = (source.name if source else "" for source in sources)
    if given is None or (budget, noise) == ("COMMANDLINE", "DEFAULT_MAP"):
        return None
    if budget == noise:
        raise InvalidArgument("--epsilon and --noise-multiplier contradict each other: give one of them.")
    return given


def _completed(given: TrainingSettings, about: dict[str, Any] | None, context: typer.Context) -> TrainingSettings:
    """The settings of the interrupted run, with what was given on the command line; training refuses a difference."""
    if about is None:
        return given
    names = [field.name for field in fields(given) if _explicit(context, field.name)]
    return replace(TrainingSettings(**about["settings"]), **{name: asdict(given)[name] for name in names})


def _completed_data(
    context: typer.Context, data: DataGroup, columns: dict[str, Any], about: dict[str, Any], folder: Path
) -> tuple[DataGroup, dict[str, Any]]:
    """The data of the interrupted run. Raises InvalidArgument if other data is given now."""
    saved = tomllib.loads(about.get("config") or "") or {"data": about["source"] or data.data}
    before = replace(DataGroup(), **{one.name: saved[one.name] for one in fields(data) if one.name in saved})
    rules: dict[str, Any] = {name: saved[name] for name in SCHEMA_KEYS if name in saved}
    names = [one.name for one in fields(data) if _explicit(context, one.name)]
    if "data_dir" in names:  # the files may have moved
        before = replace(before, data_dir=data.data_dir)
    now = replace(before, schema=data.schema, **{name: getattr(data, name) for name in names if name != "schema"})
    stated = now.own(**(columns or (rules if data.schema is None else {})))
    if now.data != before.data or stated != before.own(**rules):
        raise InvalidArgument(
            f"the run in {folder} was begun with other arguments (about the data): resume it with the same ones, or with "
            "none."
        )
    return before, rules


def _finished(folder: RunFolder) -> bool:
    if not folder.ledger.exists() or folder.unfinished:
        return False
    folder.checkpoint.unlink(missing_ok=True)  # cut off after run.json was written, before the key was removed
    return True


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
