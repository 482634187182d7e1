"""`clipless check`: the report of `clipless.check` on the first records of a data set."""

from collections.abc import Callable

import torch
import typer
from torch import Tensor, nn

from clipless import preflight
from clipless.app import clippings, models
from clipless.app.cli import _output
from clipless.app.cli._data_options import DataGroup
from clipless.app.cli._options import JsonOption
from clipless.app.cli._training_options import ClippingOption, LossOption, ModelOption
from clipless.app.data import Data
from clipless.app.training import TrainingSettings
from clipless.errors import CliplessError, InvalidArgument


def check(
    data: DataGroup,
    model: ModelOption,
    loss: LossOption = None,
    clipping: ClippingOption = "auto-s",
    as_json: JsonOption = False,
) -> None:
    """How each parameter is handled, and whether the model keeps the promise, on the first records of a data set.

    The loss is that of `clipless train`, or --loss, one for each record. Exit code 0: sound, 1: unsound. The report is
    computed from the records and is not private.
    """
    how = clippings.parse_one(clipping, "check")
    records = data.load()
    losses = TrainingSettings(loss=loss).losses_for(records)
    subject = models.build(model, records.shape, records.classes, records.vocabulary)
    batch = records.train[: preflight.MOST_RECORDS]
    with_loss = _on_batches(losses)
    _refuse_misfit(subject, model, batch, records, with_loss)
    report = preflight.check(subject, with_loss, batch, how)
    if as_json:
        _output.show_json({"model": model, "data": records.name, "clipping": clipping, **report.to_dict()})
    else:
        typer.echo(str(report))
    if not report.sound:
        raise typer.Exit(1)


BatchLosses = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


def _on_batches(losses: Callable[[Tensor, Tensor], Tensor]) -> BatchLosses:
    return lambda model, batch: losses(model(batch[0]), batch[1])


def _refuse_misfit(model: nn.Module, name: str, batch: tuple[Tensor, ...], records: Data, losses: BatchLosses) -> None:
    """Raises InvalidArgument if the model cannot run on the data: that is not an unsound model."""
    training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            losses(model.eval(), batch)
    except CliplessError:
        raise
    except Exception as error:
        raise InvalidArgument(
            f"the model {name!r} cannot be trained on {records.name} ({error}). It must map records of shape "
            f"{records.shape} to {records.classes} logits."
        ) from error
    finally:
        for module, mode in training.items():
            module.training = mode
