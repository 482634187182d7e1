"""The folder of one run, and the state of the run.

While training it holds `ledger.jsonl` and `checkpoint.pt`. At the end `model.pt` and `run.json` are added, and the
checkpoint, which holds a key of the noise, is removed. A run is finished when `run.json` names its ledger.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipless.errors import DamagedFile, InvalidArgument
from clipless.neighbours import with_relation
from clipless.runs.durable_files import replace_file
from clipless.runs.journal import Journal
from clipless.runs.ledger_file import LedgerFile, read_ledger


@dataclass(frozen=True)
class RunFolder:
    """The files of a run."""

    path: Path

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def model(self) -> Path:
        return self.path / "model.pt"

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    def read_record(self) -> dict[str, Any] | None:
        """The contents of `run.json`; None if it does not exist."""
        try:
            content = json.loads(self.record.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise DamagedFile(
                f"{self.record} cannot be read ({error}). Restore it from a copy, or move it away."
            ) from error
        if not isinstance(content, dict):
            raise DamagedFile(f"{self.record} is not the record of a run. Restore it from a copy, or move it away.")
        return content

    def read_ledger(self) -> LedgerFile | None:
        """The ledger, a torn last line included; None if there is none. Raises `DamagedFile` if it is not the one that
        `run.json` names, or shorter."""
        file = (self.read_record() or {}).get("ledger_file")
        if not self.ledger.exists():
            if file is None:
                return None
            raise DamagedFile(
                f"{self.ledger} is missing, and {self.record} says that the run has one. Put it back; without it, do not "
                "trust any epsilon of this run."
            )
        found = read_ledger(self.ledger, torn=True)
        if file is not None:
            if not isinstance(file, dict) or file.get("run") != found.run:
                raise DamagedFile(
                    f"{self.ledger} is not the ledger of the run in {self.record}. Put back the files of one run."
                )
            found.position_of(str(file.get("head")))
        return found

    @property
    def holds_private_run(self) -> bool:
        """Whether a private run was begun here, finished or not, whose ledger has to stay."""
        return self.read_ledger() is not None or self.checkpoint.exists()

    @property
    def unfinished(self) -> bool:
        """Whether a run was begun here and not finished."""
        if not (self.ledger.exists() or self.checkpoint.exists()):
            return False
        found, file = self.read_ledger(), (self.read_record() or {}).get("ledger_file") or {}
        return found is None or found.run != file.get("run")

    def refuse_private_run(self) -> None:
        """Raises InvalidArgument if a private run was begun here."""
        if self.holds_private_run:
            raise InvalidArgument(
                f"{self.path} holds a run, and what it spent stays spent: choose another folder (--out)."
            )

    def resumable(self, resume: bool) -> bool:
        """Whether there is a checkpoint to resume from. `resume` says whether the caller wants to resume.

        Raises InvalidArgument for a finished run that should be resumed, and for any run that should not.
        """
        if not self.holds_private_run:
            return False
        if not self.unfinished:
            raise InvalidArgument(
                f"the run in {self.path} is finished: there is nothing to resume."
                if resume
                else f"{self.path} holds a finished run, and its ledger has to be kept: choose another folder (--out)."
            )
        if not resume:
            raise InvalidArgument(
                f"{self.path} holds an interrupted run: resume it (--resume), or choose another folder (--out)."
            )
        return self.checkpoint.exists()

    def discard_unused_ledger(self, plan: Mapping[str, Any]) -> None:
        """Remove the ledger of a run of this plan that was interrupted before its first checkpoint, hence before its
        first step. Raises InvalidArgument if the unfinished run here has steps or another plan."""
        if not (self.ledger.exists() and self.unfinished):
            return
        found = read_ledger(self.ledger, torn=True)
        if found.entries or found.torn:
            raise InvalidArgument(
                f"{self.ledger} has steps, and the checkpoint beside it is missing: the run cannot go on. Choose another "
                "folder; what this run spent stays spent."
            )
        if with_relation(found.plan) != json.loads(json.dumps(plan)):
            raise InvalidArgument(
                f"the run in {self.path} was interrupted before its first step, with another plan: give the same arguments "
                "again, or choose another folder."
            )
        journal, _ = Journal.resume(self.ledger, found.run, 0, found.start)
        self.ledger.unlink()
        journal.close()

    def discard_unstarted(self) -> None:
        """Remove the files of a run that failed before its first step, hence released nothing. Any other run stays."""
        if self.ledger.exists() and self.unfinished:
            found = read_ledger(self.ledger, torn=True)
            if not found.entries and not found.torn:
                self.checkpoint.unlink(missing_ok=True)
                self.ledger.unlink()

    def check_writable(self) -> None:
        """Raises InvalidArgument if files cannot be written there: better known before training than after."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise InvalidArgument(f"cannot write to {self.path} ({error}). Choose another folder.") from error

    def keep_earlier(self) -> None:
        """Rename the files of a run without privacy to `run.1.json` and so on. Raises InvalidArgument if a private run is
        here."""
        self.refuse_private_run()
        number, files = 1, (self.record, self.model, self.config)
        while any(_numbered(file, number).exists() for file in files):
            number += 1
        for file in files:
            if file.exists():
                file.rename(_numbered(file, number))

    def write_record(self, record: dict[str, Any]) -> None:
        """Write `run.json` atomically."""
        content = json.dumps(record, indent=2) + "\n"
        replace_file(self.record, lambda file: file.write(content.encode()))


def _numbered(file: Path, number: int) -> Path:
    return file.with_suffix(f".{number}{file.suffix}")
