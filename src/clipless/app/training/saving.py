"""Saving a training run as it goes, and resuming it after an interruption."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from clipless.app.settings import CHECKPOINT_SECONDS
from clipless.distributed import Alone, Ranks
from clipless.errors import Interrupted, InvalidArgument
from clipless.private import Private
from clipless.runs.checkpoint import read_checkpoint
from clipless.runs.run_folder import RunFolder


@dataclass(frozen=True)
class Saving:
    """Save the run in the folder `out`: its ledger, and a checkpoint after every epoch and every `every` seconds.

    `resume` continues the run that was interrupted there, if there is one; `reseed` continues it with new noise, and the
    steps after the checkpoint stay counted. `data` is the data set's name on the command line,
    `config` the effective configuration as a file.
    """

    out: Path
    resume: bool = False
    reseed: bool = False
    every: float = CHECKPOINT_SECONDS
    data: str | None = None
    config: str | None = None


@dataclass
class LoopState:
    """The state of the training loop itself: the scores of all tests, the step of the last one, seconds of training, and the
    average of the weights if there is one."""

    scores: list[float] = field(default_factory=list)
    tested: int = 0
    seconds: float = 0.0
    average: dict[str, Tensor] = field(default_factory=dict)


def saved_about(out: Path) -> dict[str, Any] | None:
    """`data`, `source`, `config` and `settings` of the run whose checkpoint is in this folder; None without a checkpoint."""
    folder = RunFolder(out)
    return read_checkpoint(folder.checkpoint).extra["about"] if folder.checkpoint.exists() else None


class RunSaver:
    """Saves one run. Does nothing if the run is not private or `saving` is None."""

    def __init__(
        self,
        private: Private | None,
        saving: Saving | None,
        about: Mapping[str, Any],
        stop: Callable[[], bool],
        ranks: Alone | Ranks,
    ) -> None:
        self._private = private if saving else None
        self._saving = saving
        own = {"source": saving.data, "config": saving.config} if saving else {"source": None, "config": None}
        self._about = dict(about) | own
        self._stop, self._ranks = stop, ranks
        self._state = LoopState()
        self._started = self._saved = time.monotonic()
        self._began = False

    def begin(self) -> LoopState:
        """Resume the interrupted run, or start a new one; returns the state of its loop."""
        if self._saving and self._private:
            folder = RunFolder(self._saving.out)
            with self._ranks.together("the run's folder"):
                resumable = self._ranks.rank == 0 and self._prepare_folder(folder, self._private)
            if self._ranks.shared(resumable):
                self._resume(folder, self._private)
            else:
                self._private.save_to(folder.ledger)
                self._began = self._ranks.rank == 0
                self.save()
        self._stop_if_asked(self._asked(due=True)[1], saved=True)
        return self._state

    def before_test(self, last: bool) -> None:
        """Save after the last step: what follows may fail, and must not lose the run."""
        if last:
            self.save()

    def after_step(self, epoch_ended: bool) -> None:
        """Save at the end of an epoch or if it is time, and stop if asked to."""
        due, stop = self._asked(self._saving is not None and time.monotonic() - self._saved >= self._saving.every)
        if epoch_ended or due:
            self.save()
        self._stop_if_asked(stop, saved=epoch_ended or due)

    def abandon(self) -> None:
        """Remove the files of a run that failed before its first step, so that the corrected one can take the folder.
        Only of a run that was begun here: the folder may hold that of another process, which has no step yet."""
        if self._began and self._saving:
            RunFolder(self._saving.out).discard_unstarted()

    def _prepare_folder(self, folder: RunFolder, private: Private) -> bool:
        """Whether there is a run to resume; otherwise the folder is made ready for a new one."""
        assert self._saving
        if folder.resumable(self._saving.resume):
            return True
        folder.check_writable()
        folder.discard_unused_ledger(private.plan.to_dict())
        folder.keep_earlier()
        return False

    def _asked(self, due: bool) -> tuple[bool, bool]:
        """Whether it is time to save, by the first rank's clock, and whether any rank was asked to stop."""
        votes = self._ranks.gathered((due, self._stop()))
        return votes[0][0], any(stop for _, stop in votes)

    def seconds(self) -> float:
        """Seconds of training, in this process and before."""
        return self._state.seconds + time.monotonic() - self._started

    def _resume(self, folder: RunFolder, private: Private) -> None:
        assert self._saving
        extra = read_checkpoint(folder.checkpoint).extra
        before, now = ({**about["settings"], "data": about["data"]} for about in (extra["about"], self._about))
        changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        if changed:
            raise InvalidArgument(
                f"the run in {folder.path} was begun with other arguments (different: {', '.join(changed)}): resume it "
                "with the same ones, or with none."
            )
        private.load_checkpoint(folder.checkpoint, reseed=self._saving.reseed)
        self._state = LoopState(**extra["loop"])
        self._about = extra["about"]
        if self._saving.reseed:
            self.save()  # or the new keys would be lost with the next interruption

    def save(self) -> None:
        """Write a checkpoint."""
        if self._saving and self._private:
            loop = asdict(self._state) | {"seconds": self.seconds()}
            checkpoint = RunFolder(self._saving.out).checkpoint
            self._private.save_checkpoint(checkpoint, extra={"about": self._about, "loop": loop})
            self._saved = time.monotonic()

    def _stop_if_asked(self, asked: bool, saved: bool) -> None:
        if not asked:
            return
        if not (self._saving and self._private):
            raise Interrupted("stopped. Only private runs are saved as they go, so this one has to start again.")
        if not saved:
            self.save()
        raise Interrupted(
            f"stopped after step {self._private.steps_taken} of {self._private.plan.steps}, and saved. To continue:  "
            f"clipless train --resume --out {self._saving.out}"
        )
