"""The folder of one run, and what state it is in.

While training, `ledger.jsonl` and `checkpoint.pt`; at the end `model.pt` and `run.json`, and the checkpoint, which holds
the seed of the noise, is removed. A run is finished when `run.json` names its ledger.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipless.accounting.chain import LedgerFile, read_ledger
from clipless.durable import replace_file
from clipless.errors import DamagedFile, InvalidArgument


@dataclass(frozen=True)
class RunFolder:
    """Where the files of a run lie."""

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

    def read_record(self) -> dict[str, Any] | None:
        """What `run.json` says; None if there is none."""
        try:
            content = json.loads(self.record.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise DamagedFile(
                f"{self.record} cannot be read ({error}). Restore it from a copy, or move it away."
            ) from error
        if not isinstance(content, dict):
            raise DamagedFile(f"{self.record} is not the record of a run. Restore it from a copy, or move it away.")
        return content

    def read_ledger(self) -> LedgerFile | None:
        """What the ledger says, a torn last line included; None if there is none. It must reach as far as `run.json`
        says it did."""
        if not self.ledger.exists():
            return None
        found = read_ledger(self.ledger, torn=True)
        file = (self.read_record() or {}).get("ledger_file") or {}
        if file.get("run") == found.run:
            found.position_of(str(file.get("head")))
        return found

    @property
    def unfinished(self) -> bool:
        """Whether a run was begun here and did not come to its end."""
        if not (self.ledger.exists() or self.checkpoint.exists()):
            return False
        found, file = self.read_ledger(), (self.read_record() or {}).get("ledger_file") or {}
        return found is None or found.run != file.get("run")

    def check_writable(self) -> None:
        """Raises InvalidArgument when a run could not be written there: better known before training than after."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise InvalidArgument(f"cannot write to {self.path} ({error}). Choose another folder.") from error

    def keep_earlier(self) -> None:
        """Rename the files of a finished run, whose ledger may still be needed: `run.1.json` and so on, counting up.
        The ledger of an unfinished run stays, so that it can be resumed."""
        number = 1
        files = (self.record, self.model) if self.unfinished else (self.record, self.model, self.ledger)
        while any(_numbered(file, number).exists() for file in files):
            number += 1
        for file in files:
            if file.exists():
                file.rename(_numbered(file, number))

    def write_record(self, record: dict[str, Any]) -> None:
        """`run.json`, in one move."""
        content = json.dumps(record, indent=2) + "\n"
        replace_file(self.record, lambda file: file.write(content.encode()))


def _numbered(file: Path, number: int) -> Path:
    return file.with_suffix(f".{number}{file.suffix}")
