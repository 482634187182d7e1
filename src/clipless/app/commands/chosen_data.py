"""The data set that the options of a command choose."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clipless.app import data as data_sets
from clipless.app.data import DATA, Data, OwnData
from clipless.app.options.data import DataGroup
from clipless.app.terminal.progress import reporting_bar
from clipless.app.toml_files import read_schema


def own_data(group: DataGroup, columns: Mapping[str, Any] | None = None, made_from: str | None = None) -> OwnData:
    """What is stated about the data. Rules in --schema win over those of `columns`, from a configuration file."""
    read, origin = read_schema(group.schema) if group.schema else ({}, None)
    return OwnData(
        target=tuple(group.target or ()),
        task=group.task,
        classes=group.classes,
        columns={**(columns or {}), **read},
        made_from=origin or made_from,
        drop=tuple(group.drop or ()),
        test=group.test,
    )


def load_data(group: DataGroup, columns: Mapping[str, Any] | None = None, made_from: str | None = None) -> Data:
    """The data set, with a bar on terminals while features are computed. Raises InvalidArgument with the remedy."""
    with reporting_bar(visible=True) as report:
        return data_sets.load(group.data, group.data_dir, own_data(group, columns, made_from), report)


def remote_name(group: DataGroup, stated: OwnData) -> str | None:
    """What other processes can load by themselves: a name unchanged, a path made absolute; None if they cannot."""
    if group.data_dir or any(asdict(stated).values()) or ":" in group.data:
        return None
    return group.data if group.data in DATA else str(Path(group.data).expanduser().resolve())
