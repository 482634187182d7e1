"""`clipless check`: the report of `clipless.check` on the first records of a data set."""

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from clipless import preflight
from clipless.app import data as data_sets
from clipless.app import models
from clipless.app.cli import _output
from clipless.app.cli._options import JsonOption
from clipless.app.cli._training_options import ClippingOption, DataOption, ModelOption
from clipless.clipping import as_clipping
from clipless.errors import CliplessError, InvalidArgument


def check(
    model: ModelOption,
    data: DataOption = "digits",
    clipping: ClippingOption = "auto-s",
    as_json: JsonOption = False,
) -> None:
    """How each parameter is handled, and whether the model keeps the promise, on the first records of a data set.

    The loss is the cross entropy of each record. Exit code 0: sound, 1: unsound. The report is computed from the records
    and is not private.
    """
    how = as_clipping(clipping)
    records = data_sets.load(data)
    subject = models.build(model, records.shape, records.classes)
    batch = records.train[: preflight.MOST_RECORDS]
    _refuse_misfit(subject, model, batch, records)
    report = preflight.check(subject, _losses, batch, how)
    if as_json:
        _output.show_json({"model": model, "data": records.name, "clipping": clipping, **report.to_dict()})
    else:
        typer.echo(str(report))
    if not report.sound:
        raise typer.Exit(1)


def _losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _refuse_misfit(model: nn.Module, name: str, batch: tuple[Tensor, ...], records: data_sets.Data) -> None:
    """Raises InvalidArgument if the model cannot run on the data: that is not an unsound model."""
    training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            _losses(model.eval(), batch)
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
