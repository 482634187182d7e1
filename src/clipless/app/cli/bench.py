"""`clipless bench`: the time and memory of a private step against a plain one."""

from clipless.app.options.bench import MeasurementGroup, ResultsGroup
from clipless.app.options.common import JsonOption


def bench(measurement: MeasurementGroup, files: ResultsGroup, as_json: JsonOption = False) -> None:
    """Time and peak memory of one private training step over plain training, and how both grow.

    All ways take their steps in turn in one process, on the same records, noise included. Results are kept by machine.
    With --readme the tables of all in the folder go between the lines <!-- speed --> and <!-- end of speed --> of a page.
    The exit code is 1 when a way of clipless failed.
    """
    from clipless.app.commands.bench import run

    run(measurement, files, as_json=as_json)
