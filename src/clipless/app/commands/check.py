"""The body of `clipless check`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import typer
from torch import Tensor, nn

from clipless import preflight
from clipless.app import clippings, models
from clipless.app.commands.chosen_data import load_data
from clipless.app.data import Data
from clipless.app.options.data import DataGroup
from clipless.app.settings import TrainingSettings
from clipless.app.terminal import output
from clipless.app.training.settings import losses_for
from clipless.errors import CliplessError, InvalidArgument


def run(
    data: DataGroup, columns: Mapping[str, Any], model: str, loss: str | None, clipping: str, *, as_json: bool
) -> None:
    """Check the model and show the report; exit code 1 if it is unsound."""
    how = clippings.parse_one(clipping, "check")
    records = load_data(data, **columns)
    losses = losses_for(TrainingSettings(loss=loss), records)
    subject = models.build(model, records.shape, records.classes, records.vocabulary)
    batch = records.train[: preflight.MOST_RECORDS]
    with_loss = _on_batches(losses)
    _refuse_misfit(subject, model, batch, records, with_loss)
    report = preflight.check(subject, with_loss, batch, how)
    if as_json:
        output.show_json({"model": model, "data": records.name, "clipping": clipping, **report.to_dict()})
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
