"""`clipless compare`: several clippings, and no privacy, at one budget over repeated runs."""

from pathlib import Path
from typing import Annotated

import typer

from clipless.app import names
from clipless.app.cli._config import ConfigOption, config_columns
from clipless.app.options.common import PRIVACY_PANEL, JsonOption, listing
from clipless.app.options.data import DataGroup
from clipless.app.options.training import (
    DEFAULTS,
    BudgetGroup,
    LossOption,
    ModelOption,
    RefinementGroup,
    StepsGroup,
    settings_of,
)


def compare(
    context: typer.Context,
    data: DataGroup,
    budget: BudgetGroup,
    steps: StepsGroup,
    refinements: RefinementGroup,
    clippings: Annotated[
        str,
        typer.Option(
            help="What is compared, separated by commas; none is training without privacy.",
            autocompletion=listing((*names.CLIPPINGS, names.NO_CLIPPING)),
            rich_help_panel=PRIVACY_PANEL,
        ),
    ] = "auto-s,abadi,dc-p,none",
    repeats: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each, with randomness of their own.")] = 3,
    config: ConfigOption = None,
    model: ModelOption = DEFAULTS.model,
    loss: LossOption = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Repeats a comparison, for experiments: such runs are not private. Default: none."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs, table and figure.")] = Path("runs/compare"),
    kind: Annotated[str, typer.Option("--format", help="Kind of the figure: png, svg or pdf.")] = "svg",
    as_json: JsonOption = False,
) -> None:
    """Train several clippings, and without privacy, at one budget over seeds: one table, one figure, and which to take.

    Runs are stored as they end: the same command continues where it was interrupted. More seeds and clippings can be added
    later.
    """
    settings = settings_of(budget, steps, refinements, model=model, loss=loss, seed=seed, test_every=steps.epochs)
    from clipless.app.commands.compare import run

    run(data, config_columns(context), settings, clippings, repeats, out=out, kind=kind, as_json=as_json)
