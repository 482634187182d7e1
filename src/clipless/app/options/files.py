"""Options of `clipless train` about the run's files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from clipless.app.options.common import FILES_PANEL
from clipless.app.settings import CHECKPOINT_SECONDS


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
            help="Continue the run in --out with the arguments it was started with; start it if there is none.",
            rich_help_panel=FILES_PANEL,
        ),
    ] = False
    reseed: Annotated[
        bool,
        typer.Option(
            "--reseed",
            help="With --resume: draw new noise; steps after the checkpoint stay counted.",
            rich_help_panel=FILES_PANEL,
        ),
    ] = False
    checkpoint_every: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds between checkpoints; there is also one after every epoch.",
            rich_help_panel=FILES_PANEL,
        ),
    ] = CHECKPOINT_SECONDS
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            help="Also write TensorBoard files to this folder, with tags private/... and not_private/...",
            rich_help_panel=FILES_PANEL,
        ),
    ] = None
