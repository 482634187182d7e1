"""The body of `clipless check`."""

from collections.abc import Mapping
from typing import Any

import typer

from clipless import preflight
from clipless.app import clippings, models
from clipless.app.commands.chosen_data import load_data
from clipless.app.options.data import DataGroup
from clipless.app.settings import TrainingSettings
from clipless.app.terminal import output
from clipless.app.training.fitting import refuse_misfit
from clipless.app.training.own_loss import made_up
from clipless.app.training.settings import losses_for


def run(
    data: DataGroup, columns: Mapping[str, Any], model: str, loss: str | None, clipping: str, *, as_json: bool
) -> None:
    """Check the model and show the report; exit code 1 if it is unsound."""
    how = clippings.parse_one(clipping, "check")
    records = load_data(data, **columns)
    losses = losses_for(TrainingSettings(loss=loss), records)
    subject = models.build(model, records.shape, records.classes, records.vocabulary)
    batch = made_up(records, preflight.MOST_RECORDS)  # the figures that are shown are those of single records
    refuse_misfit(subject, model, records, losses, own_loss=loss is not None)
    report = preflight.check(subject, lambda model, batch: losses(model(batch[0]), batch[1]), batch, how)
    if as_json:
        output.show_json({"model": model, "data": records.name, "clipping": clipping, **report.to_dict()})
    else:
        typer.echo(str(report))
    if not report.sound:
        raise typer.Exit(1)
