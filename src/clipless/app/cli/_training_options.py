"""Options of a training run that several commands share, in groups (see `_groups`)."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from clipless.accounting import ACCOUNTANTS
from clipless.app.models import MODELS, TEXT_MODELS
from clipless.app.training import LR_SCHEDULES, OPTIMIZERS, TrainingSettings
from clipless.clipping import CLIPPINGS
from clipless.noise import NOISE_SOURCES

DEFAULTS = TrainingSettings()
DATA_PANEL, MODEL_PANEL, PRIVACY_PANEL, STEPS_PANEL = "Data", "Model", "Privacy", "Training"


def starting(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes a name in the shell."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


ModelOption = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(MODELS)}; for texts {', '.join(TEXT_MODELS)}; or package.module:function, called with (shape, "
        "classes).",
        autocompletion=starting((*MODELS, *TEXT_MODELS)),
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
        help=f"{', '.join(CLIPPINGS)}, with numbers of its own as 'dc-p(percentile=0.3, bins=30)'.",
        autocompletion=starting(CLIPPINGS),
        rich_help_panel=PRIVACY_PANEL,
    ),
]
TrainClippingOption = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(CLIPPINGS)}, with numbers of its own as 'dc-p(percentile=0.3, bins=30)', or none for training "
        "without privacy.",
        autocompletion=starting((*CLIPPINGS, "none")),
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
    float | None, typer.Option(help="Default: N ** -1.1 for N training records.", rich_help_panel=PRIVACY_PANEL)
]
LearningRateOption = Annotated[
    float | None,
    typer.Option(help="Learning rate. Default: one that suits the optimizer.", rich_help_panel=STEPS_PANEL),
]
NoiseOption = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(NOISE_SOURCES)}. Default: secure, or seeded with --seed.",
        autocompletion=starting(NOISE_SOURCES),
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
        typer.Option(
            help="pld, rdp, or gdp (an approximation).",
            autocompletion=starting(ACCOUNTANTS),
            rich_help_panel=PRIVACY_PANEL,
        ),
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
            help=f"{', '.join(OPTIMIZERS)}.", autocompletion=starting(OPTIMIZERS), rich_help_panel=STEPS_PANEL
        ),
    ] = DEFAULTS.optimizer
    lr: LearningRateOption = None


@dataclass(frozen=True)
class RefinementGroup:
    """What `train` and `compare` take about steps besides."""

    lr_schedule: Annotated[
        str,
        typer.Option(
            help=f"Of the learning rate over the run: {', '.join(LR_SCHEDULES)}.",
            autocompletion=starting(LR_SCHEDULES),
            rich_help_panel=STEPS_PANEL,
        ),
    ] = DEFAULTS.lr_schedule
    momentum: Annotated[float | None, typer.Option(help="Of sgd. Default: 0.9.", rich_help_panel=STEPS_PANEL)] = None
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
