"""Options of a training run that several commands share."""

from typing import Annotated

import typer

from clipless.app.data import DATA
from clipless.app.models import MODELS, TEXT_MODELS
from clipless.app.training import LR_SCHEDULES, OPTIMIZERS
from clipless.clipping import CLIPPINGS
from clipless.noise import NOISE_SOURCES

DataOption = Annotated[
    str, typer.Option(help=f"{', '.join(DATA)}, a folder of idx files (MNIST format), FILE.npz or FILE.csv.")
]
ModelOption = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(MODELS)}; for texts {', '.join(TEXT_MODELS)}; or package.module:factory, called with (shape, "
        "classes)."
    ),
]
ClippingOption = Annotated[
    str, typer.Option(help=f"{', '.join(CLIPPINGS)}, with numbers of its own as 'dc-p(percentile=0.3, bins=30)'.")
]
NoiseMultiplierOption = Annotated[
    float | None, typer.Option(help="Ratio of noise to sensitivity, in place of --epsilon, which is then computed.")
]
MomentumOption = Annotated[float | None, typer.Option(help="Of sgd. Default: 0.9.")]
WeightDecayOption = Annotated[float | None, typer.Option(help="Default: the optimizer's own.")]
LrScheduleOption = Annotated[str, typer.Option(help=f"Of the learning rate over the run: {', '.join(LR_SCHEDULES)}.")]
AveragingOption = Annotated[
    float, typer.Option(help="Decay of a moving average of the weights, tested and saved in their place; 0: none.")
]
UnitGradientsOption = Annotated[
    bool, typer.Option("--unit-gradients", help="Give the optimizer gradients in units of the step's threshold.")
]
EpsilonOption = Annotated[float, typer.Option(help="The privacy budget of the whole run.")]
DeltaOption = Annotated[float | None, typer.Option(help="Default: N ** -1.1 for N training records.")]
EpochsOption = Annotated[int, typer.Option(help="Passes over the training records.")]
BatchSizeOption = Annotated[int, typer.Option(help="Expected size of a batch.")]
OptimizerOption = Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")]
LearningRateOption = Annotated[float | None, typer.Option(help="Learning rate. Default: one that suits the optimizer.")]
NoiseOption = Annotated[
    str | None, typer.Option(help=f"{', '.join(NOISE_SOURCES)}. Default: secure, or seeded with --seed.")
]
