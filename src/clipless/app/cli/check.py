"""`clipless check`: the report of `clipless.check` on made-up records."""

import typer

from clipless.app.cli._config import CheckConfigOption, config_columns
from clipless.app.options.common import JsonOption
from clipless.app.options.data import DataGroup
from clipless.app.options.training import ClippingOption, LossOption, ModelOption


def check(
    context: typer.Context,
    data: DataGroup,
    model: ModelOption,
    config: CheckConfigOption = None,
    loss: LossOption = None,
    clipping: ClippingOption = "auto-s",
    as_json: JsonOption = False,
) -> None:
    """How each parameter is handled, and whether the model keeps the promise, on made-up records.

    The loss is that of `clipless train`, or --loss, one for each record. Exit code 0: sound, 1: unsound. The report is
    computed from the records and is not private.
    """
    from clipless.app.commands.check import run

    run(data, config_columns(context), model, loss, clipping, as_json=as_json)
