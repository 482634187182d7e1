"""A run of `clipless train` before its first step: new, or resumed with the arguments that it was begun with."""

import re
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from clipless.app.cli import _output
from clipless.app.cli._config import config_columns, config_text
from clipless.app.cli._data_options import SCHEMA_KEYS, DataGroup
from clipless.app.cli._processes import rank
from clipless.app.data import Data
from clipless.app.training import Saving, TrainingSettings, saved_about
from clipless.errors import InvalidArgument
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


@dataclass(frozen=True)
class BegunRun:
    """A run before its first step, new or resumed."""

    data: DataGroup
    records: Data
    settings: TrainingSettings
    folder: Path
    config: str

    @classmethod
    def of(
        cls, context: typer.Context, data: DataGroup, given: TrainingSettings, files: FilesGroup
    ) -> "BegunRun | None":
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


def _slug(*words: str) -> str:
    """A name for a run's folder: 'dc-p(percentile=0.3)' and 'package.module:factory' make no good ones as they are."""
    return re.sub(r"[^\w.=-]+", "-", "-".join(word.replace(":", ".") for word in words)).strip("-")


def _explicit(context: typer.Context, name: str) -> bool:
    """Whether an option was given, on the command line or in the configuration file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")


def chosen_multiplier(context: typer.Context, given: float | None) -> float | None:
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
