"""`clipless tune`: try a grid of settings under one guarantee, release the best run."""

from pathlib import Path
from typing import Annotated

import typer

from clipless.app.cli._config import GridConfigOption, config_columns, config_grid
from clipless.app.options.common import JsonOption
from clipless.app.options.data import DataGroup
from clipless.app.options.training import DEFAULTS, NoiseOption
from clipless.app.options.tuning import ExecutorGroup, SearchGroup, SharedGroup


def tune(
    context: typer.Context,
    data: DataGroup,
    search: SearchGroup,
    shared: SharedGroup,
    executor: ExecutorGroup,
    config: GridConfigOption = None,
    noise: NoiseOption = DEFAULTS.noise,
    seed: Annotated[
        int | None,
        typer.Option(help="For tests: repeats a search. Whoever knows the seed can subtract the noise. Default: none."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the files. Default: runs/DATA-tuned.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the price and stop; nothing is spent.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a grid of candidates, choose the best by its test, and release it under one total (epsilon, delta).

    The price of the whole search is in ledger.jsonl before the first run begins. Only --method grid pays for showing every
    run; otherwise nothing of the other runs is shown or stored: no score, no model, not even their number.
    """
    from clipless.app.commands.tune import TuneRequest, run

    columns, grid = config_columns(context), config_grid(context)
    run(TuneRequest(data, columns, search, grid, shared, executor, noise, seed, out), dry_run=dry_run, as_json=as_json)
