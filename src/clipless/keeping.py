"""How a training run is kept on disk while it goes on, and how it finds its way back after an interruption."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clipless.accounting.chain import read_ledger
from clipless.accounting.journal import Journal
from clipless.checkpoint import read_checkpoint
from clipless.errors import Interrupted, InvalidArgument
from clipless.private import Private
from clipless.runs import RunFolder


@dataclass(frozen=True)
class Saving:
    """Keep the run in the folder `out`: its ledger, and a checkpoint after every epoch and every `every` seconds.

    `resume` goes on with the run that was interrupted there, if there is one; `reseed` does so with new noise, leaving
    the steps after the checkpoint counted. `data` is how the data set is called on the command line.
    """

    out: Path
    resume: bool = False
    reseed: bool = False
    every: float = 60.0
    data: str | None = None


@dataclass
class Kept:
    """What the training loop itself has to remember: test accuracies, the step of the last test, time used."""

    accuracies: list[float] = field(default_factory=list)
    tested: int = 0
    seconds: float = 0.0


def saved_about(out: Path) -> dict[str, Any] | None:
    """What the checkpoint in this folder says of its run: `data`, `source`, `settings`. None if there is none."""
    folder = RunFolder(out)
    return read_checkpoint(folder.checkpoint).extra["about"] if folder.checkpoint.exists() else None


class Keeper:
    """Saves one run; does nothing for a run that is not private or not to be saved."""

    def __init__(
        self, private: Private | None, saving: Saving | None, about: Mapping[str, Any], stop: Callable[[], bool]
    ) -> None:
        self._private = private if saving else None
        self._saving = saving
        self._about = dict(about) | {"source": saving.data if saving else None}
        self._stop = stop
        self._kept = Kept()
        self._started = self._saved = time.monotonic()

    def begin(self) -> Kept:
        """Find the interrupted run, or begin a new one; returns what was remembered of it."""
        if self._saving and self._private:
            folder = RunFolder(self._saving.out)
            unfinished = folder.unfinished
            if self._saving.resume and folder.ledger.exists() and not unfinished:
                raise InvalidArgument(f"the run in {folder.path} is finished: there is nothing to resume.")
            if unfinished and not self._saving.resume:
                raise InvalidArgument(
                    f"{folder.path} holds an interrupted run: resume it (--resume), or choose another folder (--out)."
                )
            if folder.checkpoint.exists() and unfinished:
                self._resume(folder, self._private)
            else:
                self._start(folder, self._private)
        self._stop_if_asked(saved=True)
        return self._kept

    def after_step(self, epoch_ended: bool) -> None:
        """Save if it is time, and stop if that was asked for."""
        due = self._saving is not None and time.monotonic() - self._saved >= self._saving.every
        if epoch_ended or due:
            self._save()
        self._stop_if_asked(saved=epoch_ended or due)

    def seconds(self) -> float:
        """Time used for training, in this process and before."""
        return self._kept.seconds + time.monotonic() - self._started

    def _start(self, folder: RunFolder, private: Private) -> None:
        folder.check_writable()
        if folder.ledger.exists() and folder.unfinished:
            _discard_unused(folder.ledger, private)
        folder.keep_earlier()
        private.save_to(folder.ledger)
        self._save()

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
        self._kept = Kept(**extra["kept"])
        self._about = extra["about"]
        if self._saving.reseed:
            self._save()  # or the new seed would be lost with the next interruption

    def _save(self) -> None:
        if self._saving and self._private:
            kept = asdict(self._kept) | {"seconds": self.seconds()}
            checkpoint = RunFolder(self._saving.out).checkpoint
            self._private.save_checkpoint(checkpoint, extra={"about": self._about, "kept": kept})
            self._saved = time.monotonic()

    def _stop_if_asked(self, saved: bool) -> None:
        if not self._stop():
            return
        if not (self._saving and self._private):
            raise Interrupted(
                "stopped. Only private runs are saved while they go on, so this one starts anew next time."
            )
        if not saved:
            self._save()
        raise Interrupted(
            f"stopped after step {self._private.steps_taken} of {self._private.plan.steps}, and saved. To go on:  "
            f"clipless train --resume --out {self._saving.out}"
        )


def _discard_unused(ledger: Path, private: Private) -> None:
    """Remove the ledger of a run that was cut off before its first checkpoint, and so before its first step."""
    found = read_ledger(ledger, torn=True)
    if found.entries or found.torn:
        raise InvalidArgument(
            f"{ledger} has steps, and the checkpoint beside it is missing: the run cannot go on. Choose another folder; "
            "what this run spent stays spent."
        )
    if found.plan != json.loads(json.dumps(private.plan.to_dict())):
        raise InvalidArgument(
            f"the run in {ledger.parent} was cut off before its first step, with another plan: give the same arguments "
            "again, or choose another folder."
        )
    journal, _ = Journal.resume(ledger, found.run, 0, found.start)
    ledger.unlink()
    journal.close()
