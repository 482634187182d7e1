"""`clipless train`: one run from data to files; resumes an interrupted one."""

from typing import Annotated

import typer

from clipless.app.cli._config import ConfigOption, chosen_multiplier, config_columns, given_options
from clipless.app.options.common import JsonOption
from clipless.app.options.data import DataGroup
from clipless.app.options.files import FilesGroup
from clipless.app.options.training import (
    DEFAULTS,
    AveragingOption,
    BudgetGroup,
    LossOption,
    ModelOption,
    NoiseMultiplierOption,
    NoiseOption,
    RefinementGroup,
    StepsGroup,
    TrainClippingOption,
    settings_of,
)


def train(
    context: typer.Context,
    data: DataGroup,
    budget: BudgetGroup,
    steps: StepsGroup,
    refinements: RefinementGroup,
    files: FilesGroup,
    config: ConfigOption = None,
    model: ModelOption = DEFAULTS.model,
    loss: LossOption = None,
    clipping: TrainClippingOption = DEFAULTS.clipping,
    noise_multiplier: NoiseMultiplierOption = None,
    averaging: AveragingOption = DEFAULTS.averaging,
    seed: Annotated[
        int | None,
        typer.Option(
            help="For experiments: repeats a run. Whoever knows the seed can subtract the noise. Default: none."
        ),
    ] = None,
    noise: NoiseOption = DEFAULTS.noise,
    as_json: JsonOption = False,
) -> None:
    """Train a model on a data set, test it once an epoch, write run.json and model.pt.

    Without arguments: the digits that come with scikit-learn, automatic clipping, epsilon 3. A private run writes its
    ledger (ledger.jsonl) and a checkpoint as it goes. Ctrl-C finishes the step and saves; --resume continues. Tables of
    your own: docs/own_data.md. Several processes train one run:  torchrun --nproc-per-node=2 -m clipless train ...
    """
    settings = settings_of(
        budget,
        steps,
        refinements,
        model=model,
        loss=loss,
        clipping=clipping,
        noise_multiplier=chosen_multiplier(context, noise_multiplier),
        averaging=averaging,
        seed=seed,
        noise=noise,
    )
    from clipless.app.commands.train import run

    run(data, settings, files, config_columns(context), given_options(context), as_json=as_json)
