"""Options of `clipless tune`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from clipless import defaults
from clipless.app import names
from clipless.app.options.common import starting
from clipless.app.options.training import DEFAULTS, DeltaOption, LearningRateOption
from clipless.app.settings import TUNABLE


@dataclass(frozen=True)
class SearchGroup:
    """What is tried, and under which guarantee."""

    grid: Annotated[
        Path | None, typer.Option(help="TOML file with a table `grid` of lists to try, and `settings` that all share.")
    ] = None
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            help=f"Values to try, as lr=0.05,0.1. One of {', '.join(TUNABLE)}, or a parameter of the clipping, as "
            "clipping.percentile=0.1,0.3,0.5; repeatable.",
            autocompletion=starting([f"{name}=" for name in TUNABLE]),
        ),
    ] = None
    epsilon: Annotated[float, typer.Option(help="The privacy budget of the whole search.")] = DEFAULTS.epsilon
    delta: DeltaOption = None
    method: Annotated[
        str,
        typer.Option(
            help=f"{names.AUTO_METHOD} (the least noise), {', '.join(names.SELECTION_METHODS)}.",
            autocompletion=starting((names.AUTO_METHOD, *names.SELECTION_METHODS)),
        ),
    ] = names.AUTO_METHOD
    coverage: Annotated[
        float | None,
        typer.Option(help="Chance that the best candidate is tried, where not all are. Default: over 2/3."),
    ] = None
    accountant: Annotated[
        str,
        typer.Option(help="pld or rdp; papernot-steinke always uses rdp.", autocompletion=starting(("pld", "rdp"))),
    ] = defaults.ACCOUNTANT


@dataclass(frozen=True)
class SharedGroup:
    """Settings that all candidates share; None: those of the grid, or the default."""

    model: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(names.MODELS)}, or package.module:factory. Default: {DEFAULTS.model}.",
            autocompletion=starting((*names.MODELS, *names.TEXT_MODELS)),
        ),
    ] = None
    clipping: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(names.CLIPPINGS)}. Default: {DEFAULTS.clipping}.",
            autocompletion=starting(names.CLIPPINGS),
        ),
    ] = None
    epochs: Annotated[int | None, typer.Option(help=f"Of each run. Default: {DEFAULTS.epochs}.")] = None
    batch_size: Annotated[
        int | None, typer.Option(help=f"Expected size of a batch. Default: {DEFAULTS.batch_size}.")
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(names.OPTIMIZERS)}. Default: {DEFAULTS.optimizer}.",
            autocompletion=starting(names.OPTIMIZERS),
        ),
    ] = None
    lr: LearningRateOption = None


@dataclass(frozen=True)
class ExecutorGroup:
    """Where runs are executed."""

    executor: Annotated[
        str,
        typer.Option(
            help=f"Where runs are executed: {', '.join(names.EXECUTORS)}.", autocompletion=starting(names.EXECUTORS)
        ),
    ] = names.EXECUTORS[0]
    workers: Annotated[int | None, typer.Option(help="Runs at a time. Default: as many as there are.")] = None
    dask_address: Annotated[str | None, typer.Option(help="Of the Dask scheduler, as tcp://host:8786.")] = None
