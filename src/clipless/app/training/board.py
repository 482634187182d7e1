"""TensorBoard files of a run, whose tags tell what is private from what is not."""

import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

from clipless.app.settings import TrainingSettings
from clipless.app.training.loop import TrainingProgress
from clipless.errors import InvalidArgument, MissingLibrary

PRIVATE, NOT_PRIVATE = "private", "not_private"


class Board:
    """Writes epsilon and the threshold as `private/...`, and the score on the test records as `not_private/...`. Without
    privacy, or with a seed, which allows the noise to be subtracted, everything is `not_private/...`.

    All values have the time at which the board was opened: the time a step takes grows with the batch that was drawn.
    """

    def __init__(self, folder: Path, settings: TrainingSettings, metric: str) -> None:
        self._writer, self._opened = _writer(folder), time.time()
        self._covered = PRIVATE if settings.private and settings.seed is None else NOT_PRIVATE
        self._metric, self._tested = metric, 0

    def __call__(self, progress: TrainingProgress) -> None:
        if progress.threshold is not None:
            self._write(f"{self._covered}/threshold", progress.threshold, progress.step)
        if progress.score is not None and progress.tested != self._tested:
            self._tested = progress.tested
            self._write(f"{NOT_PRIVATE}/test_{self._metric}", progress.score, progress.step)
            if progress.epsilon is not None:
                self._write(f"{self._covered}/epsilon", progress.epsilon, progress.step)

    def _write(self, tag: str, value: float, step: int) -> None:
        self._writer.add_scalar(tag, value, step, walltime=self._opened)

    def __enter__(self) -> "Board":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._writer.close()
        except OSError as error:  # the run is saved, and must not end with this
            warnings.warn(f"the TensorBoard files are not complete ({error}).", stacklevel=2)


def _writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingLibrary("--tensorboard needs TensorBoard: pip install 'clipless[tensorboard]'.") from None
    try:
        return SummaryWriter(str(folder))
    except OSError as error:
        raise InvalidArgument(
            f"cannot write to {folder} ({error}). Choose another folder for --tensorboard."
        ) from error
