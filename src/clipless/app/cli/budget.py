"""`clipless budget`: epsilon from a noise multiplier, or the noise multiplier for an epsilon."""

from pathlib import Path
from typing import Annotated

import typer

from clipless.app.options.budget import QuestionGroup
from clipless.app.options.common import JsonOption


def budget(
    question: QuestionGroup,
    ledger: Annotated[
        Path | None, typer.Option(help="Show what this ledger, or the run in this folder, has spent. Takes no sizes.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="With --ledger: a hash kept elsewhere that the ledger must contain.")
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option(
            help="Draw epsilon against steps, noise against epsilon, and the cost of tuning: all in one file (.svg, .png "
            "or .pdf), or each in a file of its own in this folder. Their data goes into a .json file beside them."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Epsilon from a noise multiplier, or the noise multiplier for an epsilon, for Poisson-sampled steps.

    Describe the run by --dataset-size, --batch-size and --epochs (or --steps), or by --sample-rate and --steps.
    """
    from clipless.app.commands.budget import run, show_spent

    if ledger is None:
        run(question, draw, as_json=as_json)
    else:
        show_spent(ledger, head, question, draw, as_json=as_json)
