"""Losses of single records, for modules whose `training_step` does not average them."""

import weakref
from typing import Any

from torch import Tensor, nn

from clipless.errors import Misuse
from clipless.private import Private

_RUNS: "weakref.WeakKeyDictionary[nn.Module, Private]" = weakref.WeakKeyDictionary()


class RecordLosses(nn.Module):
    """Mixin for a LightningModule whose `training_step` returns one loss per record, (B,), under `PrivateTraining`.

    No reduction can be misstated then, and losses that couple records are refused. Use it as
    `class Model(RecordLosses, LightningModule)`; a scalar loss is treated as before.
    """

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass of the private run."""
        if not loss.dim():
            loss.backward(*args, **kwargs)
        elif self in _RUNS:
            _RUNS[self].backward(loss)
        else:
            raise Misuse(
                "training_step returned one loss per record, which only private training takes: add PrivateTraining to "
                "Trainer(callbacks=[...]), or return the mean."
            )


def train_by(module: nn.Module, private: Private) -> None:
    """From now on losses of single records of this module are those of this run."""
    if isinstance(module, RecordLosses):
        _RUNS[module] = private
