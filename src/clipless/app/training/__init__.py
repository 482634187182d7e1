"""One training run from settings to files: `settings`, the `loop`, how it is saved and resumed, and its `result`."""

from clipless.app.training.loop import TrainingProgress, accuracy, train
from clipless.app.training.result import Result, save_run
from clipless.app.training.saving import Saving, saved_about
from clipless.app.training.settings import OPTIMIZERS, TrainingSettings

__all__ = [
    "OPTIMIZERS",
    "Result",
    "Saving",
    "TrainingProgress",
    "TrainingSettings",
    "accuracy",
    "save_run",
    "saved_about",
    "train",
]
