"""Options of a training run that several commands share."""

from typing import Annotated

import typer

from clipless.app.models import MODELS
from clipless.app.training import OPTIMIZERS
from clipless.clipping import CLIPPINGS
from clipless.noise import NOISE_SOURCES

DataOption = Annotated[str, typer.Option(help="digits, a folder of idx files (MNIST format), FILE.npz or FILE.csv.")]
ModelOption = Annotated[
    str, typer.Option(help=f"{', '.join(MODELS)}, or package.module:factory, called with (shape, classes).")
]
ClippingOption = Annotated[str, typer.Option(help=f"{', '.join(CLIPPINGS)}.")]
EpsilonOption = Annotated[float, typer.Option(help="The privacy budget of the whole run.")]
DeltaOption = Annotated[float | None, typer.Option(help="Default: N ** -1.1 for N training records.")]
EpochsOption = Annotated[int, typer.Option(help="Passes over the training records.")]
BatchSizeOption = Annotated[int, typer.Option(help="Expected size of a batch.")]
OptimizerOption = Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")]
LearningRateOption = Annotated[float | None, typer.Option(help="Learning rate. Default: one that suits the optimizer.")]
NoiseOption = Annotated[
    str | None, typer.Option(help=f"{', '.join(NOISE_SOURCES)}. Default: secure, or seeded with --seed.")
]
