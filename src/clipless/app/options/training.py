"""Options of a training run."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from clipless.app import names
from clipless.app.options.common import ACCOUNTANT_HELP, MODEL_PANEL, PRIVACY_PANEL, STEPS_PANEL, starting
from clipless.app.settings import MOMENTUM, TrainingSettings

DEFAULTS = TrainingSettings()

ModelOption = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(names.MODELS)}; for texts {', '.join(names.TEXT_MODELS)}; or package.module:function, called "
        "with (shape, classes).",
        autocompletion=starting((*names.MODELS, *names.TEXT_MODELS)),
        rich_help_panel=MODEL_PANEL,
    ),
]
LossOption = Annotated[
    str | None,
    typer.Option(
        help="package.module:function, called with (output, y): one loss for each record. Default: that of the task.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ClippingOption = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(names.CLIPPINGS)}, with parameters as in 'dc-p(percentile=0.3, bins=30)'.",
        autocompletion=starting(names.CLIPPINGS),
        rich_help_panel=PRIVACY_PANEL,
    ),
]
TrainClippingOption = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(names.CLIPPINGS)}, with parameters as in 'dc-p(percentile=0.3, bins=30)', or "
        f"{names.NO_CLIPPING} for training without privacy.",
        autocompletion=starting((*names.CLIPPINGS, names.NO_CLIPPING)),
        rich_help_panel=PRIVACY_PANEL,
    ),
]
NoiseMultiplierOption = Annotated[
    float | None,
    typer.Option(
        help="Ratio of noise to sensitivity, in place of --epsilon, which is then computed.",
        rich_help_panel=PRIVACY_PANEL,
    ),
]
AveragingOption = Annotated[
    float,
    typer.Option(
        help="Decay of a moving average of the weights, tested and saved in their place; 0: none.",
        rich_help_panel=STEPS_PANEL,
    ),
]
DeltaOption = Annotated[
    float | None,
    typer.Option(
        help="Default: 1e-5, or 1 / (10 N) for N training records if that is smaller.", rich_help_panel=PRIVACY_PANEL
    ),
]
LearningRateOption = Annotated[
    float | None,
    typer.Option(help="Learning rate. Default: one that suits the optimizer.", rich_help_panel=STEPS_PANEL),
]
NoiseOption = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(names.NOISE_SOURCES)}. Default: secure, or seeded with --seed.",
        autocompletion=starting(names.NOISE_SOURCES),
        rich_help_panel=PRIVACY_PANEL,
    ),
]


@dataclass(frozen=True)
class BudgetGroup:
    """What is promised."""

    epsilon: Annotated[
        float, typer.Option(help="The privacy budget of the whole run.", rich_help_panel=PRIVACY_PANEL)
    ] = DEFAULTS.epsilon
    delta: DeltaOption = DEFAULTS.delta
    accountant: Annotated[
        str,
        typer.Option(help=ACCOUNTANT_HELP, autocompletion=starting(names.ACCOUNTANTS), rich_help_panel=PRIVACY_PANEL),
    ] = DEFAULTS.accountant


@dataclass(frozen=True)
class StepsGroup:
    """How many steps, of which batches, by which optimizer."""

    epochs: Annotated[int, typer.Option(help="Passes over the training records.", rich_help_panel=STEPS_PANEL)] = (
        DEFAULTS.epochs
    )
    batch_size: Annotated[int, typer.Option(help="Expected size of a batch.", rich_help_panel=STEPS_PANEL)] = (
        DEFAULTS.batch_size
    )
    optimizer: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(names.OPTIMIZERS)}.",
            autocompletion=starting(names.OPTIMIZERS),
            rich_help_panel=STEPS_PANEL,
        ),
    ] = DEFAULTS.optimizer
    lr: LearningRateOption = None


@dataclass(frozen=True)
class RefinementGroup:
    """Further options of the optimizer, which `train` and `compare` take."""

    lr_schedule: Annotated[
        str,
        typer.Option(
            help=f"Of the learning rate over the run: {', '.join(names.LR_SCHEDULES)}.",
            autocompletion=starting(names.LR_SCHEDULES),
            rich_help_panel=STEPS_PANEL,
        ),
    ] = DEFAULTS.lr_schedule
    momentum: Annotated[
        float | None, typer.Option(help=f"Of sgd. Default: {MOMENTUM}.", rich_help_panel=STEPS_PANEL)
    ] = None
    weight_decay: Annotated[
        float | None, typer.Option(help="Default: the optimizer's own.", rich_help_panel=STEPS_PANEL)
    ] = None
    unit_gradients: Annotated[
        bool,
        typer.Option(
            "--unit-gradients",
            help="Give the optimizer gradients in units of the step's threshold.",
            rich_help_panel=STEPS_PANEL,
        ),
    ] = False


def settings_of(*groups: Any, **others: Any) -> TrainingSettings:
    """The settings of a run from groups of options, whose fields have the settings' names, and single ones."""
    return TrainingSettings(**{name: value for group in groups for name, value in asdict(group).items()}, **others)
