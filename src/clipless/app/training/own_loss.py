"""A loss of the user's own is tried on made-up records before the first step.

While training, a run detects records that mix in gradients, but not a loss that is multiplied by a number computed from
other records. Removing records one at a time detects both, and on made-up records it costs nothing.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from clipless import preflight
from clipless.app.data import Data
from clipless.clipping import Clipping
from clipless.errors import CliplessError, InvalidArgument
from clipless.phases import Schedule, as_schedule

RECORDS = 6


def refuse_unsound_loss(
    name: str, losses: Callable[[Tensor, Tensor], Tensor], model: nn.Module, data: Data, how: Clipping | Schedule
) -> None:
    """Raises InvalidArgument if one record's loss depends on others. The model and torch's generator are left unchanged."""
    clipping = as_schedule(how).parts[0][1]
    with torch.random.fork_rng(devices=[]):
        batch = made_up(data)
        try:
            report = preflight.check(
                copy.deepcopy(model), lambda subject, records: losses(subject(records[0]), records[1]), batch, clipping
            )
        except CliplessError:
            raise
        except Exception as error:
            raise InvalidArgument(
                f"the loss {name!r} failed on made-up records ({type(error).__name__}: {error}). It is called with (output, "
                "y) and returns one loss for each record."
            ) from error
    if report.problems:
        raise InvalidArgument(
            f"the loss {name!r} breaks the bound on one record's influence, on made-up records: {report.problems[0]}"
        )


def made_up(data: Data, count: int = RECORDS) -> tuple[Tensor, Tensor]:
    """A batch of random records of the data's form."""
    shape = (count, *data.shape)
    x = torch.randint(1, data.vocabulary, shape) if data.vocabulary else torch.randn(shape)
    if data.task == "classes":
        return x, torch.randint(data.classes, (count,))
    if data.task == "tokens":
        return x, torch.randint(data.classes, shape)
    numbers = torch.randn(count, data.classes)
    return x, numbers if data.task == "numbers" else (numbers > 0).float()
