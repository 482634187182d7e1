"""Options of `clipless budget`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from clipless import defaults
from clipless.app.options.common import AccountantOption


@dataclass(frozen=True)
class QuestionGroup:
    """Which epsilon, or which noise, of which run."""

    noise_multiplier: Annotated[float | None, typer.Option(help="Ask for the epsilon of this noise.")] = None
    epsilon: Annotated[float | None, typer.Option(help="Ask for the noise that this epsilon needs.")] = None
    dataset_size: Annotated[int | None, typer.Option(help="Number of training records.")] = None
    batch_size: Annotated[int | None, typer.Option(help="Expected size of a batch.")] = None
    epochs: Annotated[int | None, typer.Option(help="Passes over the training records.")] = None
    sample_rate: Annotated[
        float | None, typer.Option(help="Probability that a record is in a batch, instead of the two sizes.")
    ] = None
    steps: Annotated[int | None, typer.Option(help="Number of steps, instead of epochs.")] = None
    delta: Annotated[
        float | None, typer.Option(help="Default: min(1e-5, 1 / (10 N)) when --dataset-size N is given.")
    ] = None
    accountant: AccountantOption = defaults.ACCOUNTANT
