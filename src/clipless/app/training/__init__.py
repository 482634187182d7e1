"""One training run from settings to files: `settings`, the `loop`, how it is saved and resumed, and its `result`."""

from clipless.app.settings import TrainingSettings
from clipless.app.training.board import Board
from clipless.app.training.loop import TrainingProgress, train
from clipless.app.training.result import Result, save_run
from clipless.app.training.saving import Saving, saved_about
from clipless.app.training.settings import LR_SCHEDULES, OPTIMIZERS
from clipless.app.training.tasks import TASKS, LearningTask, accuracy, evaluate

__all__ = [
    "LR_SCHEDULES",
    "OPTIMIZERS",
    "TASKS",
    "Board",
    "LearningTask",
    "Result",
    "Saving",
    "TrainingProgress",
    "TrainingSettings",
    "accuracy",
    "evaluate",
    "save_run",
    "saved_about",
    "train",
]
