"""A mixin for modules whose `training_step` does not average the losses of a batch."""

from typing import Any

from torch import Tensor, nn

from clipless.errors import Misuse


class RecordLosses(nn.Module):
    """Mixin for a LightningModule whose `training_step` returns one loss per record: `class Model(RecordLosses,
    LightningModule)`. Under `PrivateTraining` it changes nothing; without, training is refused in words."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """As Lightning's, but for a loss that is not one number."""
        if loss.dim():
            raise Misuse(
                "training_step returned one loss per record, which only private training takes: add PrivateTraining to "
                "Trainer(callbacks=[...]), or return the mean."
            )
        loss.backward(*args, **kwargs)
