"""`clipless audit`: is the claimed epsilon true? Attacks on a training configuration, and the bounds they prove."""

from pathlib import Path
from typing import Annotated

import typer

from clipless.app import names
from clipless.app.cli._config import ConfigOption, chosen_multiplier, config_columns
from clipless.app.options.common import JsonOption, listing, starting
from clipless.app.options.data import DataGroup
from clipless.app.options.training import (
    DEFAULTS,
    BudgetGroup,
    ClippingOption,
    ModelOption,
    NoiseMultiplierOption,
    NoiseOption,
    StepsGroup,
    settings_of,
)
from clipless.app.settings import AuditSettings

_HOW = AuditSettings()


def audit(
    context: typer.Context,
    data: DataGroup,
    budget: BudgetGroup,
    steps: StepsGroup,
    config: ConfigOption = None,
    model: ModelOption = DEFAULTS.model,
    clipping: ClippingOption = DEFAULTS.clipping,
    noise_multiplier: NoiseMultiplierOption = None,
    seed: Annotated[int | None, typer.Option(help="Repeats an audit. Default: none.")] = None,
    noise: NoiseOption = DEFAULTS.noise,
    games: Annotated[
        str,
        typer.Option(help=f"What is played, of {', '.join(names.GAMES)}.", autocompletion=listing(names.GAMES)),
    ] = ",".join(_HOW.games),
    releases: Annotated[
        int | None, typer.Option(help="Games of the step. Default: 20,000, or 3000 with a statistic.")
    ] = None,
    canaries: Annotated[int, typer.Option(help="Canaries of the one-run game.")] = _HOW.canaries,
    kind: Annotated[
        str,
        typer.Option(
            help=f"Of the canaries: {', '.join(names.CANARY_KINDS)}.", autocompletion=starting(names.CANARY_KINDS)
        ),
    ] = _HOW.kind,
    trainings: Annotated[int, typer.Option(help="Trainings of the game runs.")] = _HOW.trainings,
    confidence: Annotated[float, typer.Option(help="Of all bounds together.")] = _HOW.confidence,
    draw: Annotated[Path | None, typer.Option(help="Draw the bounds beside the claim: FILE.svg, .png or .pdf.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result, with its configuration, as JSON.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Attack a training configuration and compare the epsilon that the attacks prove with the one that is claimed.

    Takes the arguments of train, or the config.toml of a run. Exit code 1: a lower bound exceeds the claim, or the noise is
    not as claimed. A sound configuration fails with a probability of at most 1 - confidence.
    """
    multiplier = chosen_multiplier(context, noise_multiplier)
    settings = settings_of(
        budget, steps, model=model, clipping=clipping, noise_multiplier=multiplier, seed=seed, noise=noise
    )
    played = tuple(game.strip() for game in games.split(","))
    how = AuditSettings(played, releases, canaries, kind, trainings, confidence)
    from clipless.app.commands.audit import run

    run(data, config_columns(context), settings, how, draw=draw, out=out, as_json=as_json)
