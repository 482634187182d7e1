"""Lightning: `Trainer(callbacks=[PrivateTraining(privacy)])` makes `fit` private. Tested with lightning 2.6."""

from clipless.integrations.lightning.callback import PrivateTraining
from clipless.integrations.lightning.losses import RecordLosses

__all__ = ["PrivateTraining", "RecordLosses"]
