"""A run of `clipless train` before its first step: new, or resumed with the arguments that it was started with."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from clipless.app.commands.chosen_data import load_data, own_data
from clipless.app.commands.effective_config import config_text, run_options
from clipless.app.data import Data
from clipless.app.options.data import DataGroup
from clipless.app.options.files import FilesGroup
from clipless.app.settings import TrainingSettings
from clipless.app.toml_files import SCHEMA_KEYS
from clipless.app.training import saved_about
from clipless.errors import InvalidArgument
from clipless.runs.run_folder import RunFolder


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
        cls,
        data: DataGroup,
        given: TrainingSettings,
        files: FilesGroup,
        columns: Mapping[str, Any],
        explicit: frozenset[str],
    ) -> "BegunRun | RunFolder":
        """The folder alone if the run in it is finished already."""
        records = load_data(data, **columns) if files.out is None else None
        name = records.name if records else data.data
        folder = files.out or Path("runs") / slug(name, given.model, given.clipping)
        if files.resume and _finished(RunFolder(folder)):
            return RunFolder(folder)
        RunFolder(folder).resumable(files.resume)  # or raises: a run is there that is not to be resumed
        about = saved_about(folder) if files.resume else None
        if about is not None:
            data, columns = _completed_data(explicit, data, columns, about, folder)
            records = None
        settings = _completed(given, about, explicit)
        records = records or load_data(data, **columns)
        config = config_text("train", data, own_data(data, **columns), run_options(settings))
        return cls(data, records, settings, folder, config)


def slug(*words: str) -> str:
    """A name for a run's folder, without the brackets and colons of 'dc-p(percentile=0.3)' or 'package.module:factory'."""
    return re.sub(r"[^\w.=-]+", "-", "-".join(word.replace(":", ".") for word in words)).strip("-")


def _completed(given: TrainingSettings, about: dict[str, Any] | None, explicit: frozenset[str]) -> TrainingSettings:
    """The settings of the interrupted run, with what was given now; training refuses a difference."""
    if about is None:
        return given
    names = [field.name for field in fields(given) if field.name in explicit]
    return replace(TrainingSettings(**about["settings"]), **{name: asdict(given)[name] for name in names})


def _completed_data(
    explicit: frozenset[str], data: DataGroup, columns: Mapping[str, Any], about: dict[str, Any], folder: Path
) -> tuple[DataGroup, dict[str, Any]]:
    """The data of the interrupted run. Raises InvalidArgument if other data is given now."""
    saved = tomllib.loads(about.get("config") or "") or {"data": about["source"] or data.data}
    before = replace(DataGroup(), **{one.name: saved[one.name] for one in fields(data) if one.name in saved})
    rules: dict[str, Any] = {name: saved[name] for name in SCHEMA_KEYS if name in saved}
    names = [one.name for one in fields(data) if one.name in explicit]
    if "data_dir" in names:  # the files may have moved
        before = replace(before, data_dir=data.data_dir)
    now = replace(before, schema=data.schema, **{name: getattr(data, name) for name in names if name != "schema"})
    stated = own_data(now, **(columns or (rules if data.schema is None else {})))
    if now.data != before.data or stated != own_data(before, **rules):
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
