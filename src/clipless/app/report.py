"""What the files of a run say: what it promised, what it has spent, and what in them is not private."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipless.accounting import Ledger, Spent
from clipless.errors import DamagedFile, InvalidArgument
from clipless.neighbours import OLD_NOTE, is_old, with_relation
from clipless.runs.contradictions import PRICING, broken_promise, contradicted_field
from clipless.runs.ledger_file import LedgerFile, read_ledger
from clipless.runs.run_folder import RunFolder

KEY_NOTE = "holds the key of all noise after it: whoever has it can subtract that noise"


@dataclass(frozen=True)
class RunReport:
    """The files of a run: its ledger, its `run.json`, or both."""

    path: Path
    file: LedgerFile | None
    record: dict[str, Any]

    @property
    def private(self) -> bool:
        return self.file is not None or bool(self.record.get("plan"))

    @property
    def torn(self) -> bool:
        return bool(self.file and self.file.torn)

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, with the neighbouring relation that was accounted even if an earlier version stored another."""
        return with_relation(self._stored_plan)

    @property
    def _stored_plan(self) -> Mapping[str, Any]:
        return self.file.plan if self.file else self.record["plan"]

    @property
    def notes(self) -> list[str]:
        """What a reader should know about the plan."""
        return [OLD_NOTE] if self.private and is_old(self._stored_plan) else []

    @property
    def ledger(self) -> Ledger:
        return self.file.ledger() if self.file else Ledger.from_dict(self.record["ledger"])

    def spent(self, delta: float | None = None, accountant: str | None = None) -> Spent:
        """The epsilon of everything recorded; a torn last line counts as one more step."""
        return self.ledger.spent(self.plan["delta"] if delta is None else delta, accountant or self.plan["accountant"])

    @property
    def state(self) -> str:
        """How far the ledger can be trusted, in words."""
        if self.file is None:
            return "in run.json only: changes to it would not be noticed"
        if self.torn:
            return f"line {len(self.file.entries) + 2} is torn: counted as one more step"
        return "whole: every line follows from the one before"

    @property
    def progress(self) -> str:
        if self.record:
            return "finished"
        return "unfinished" if self.ledger.steps < self.plan["steps"] else "all steps taken, not finished"

    def not_private(self) -> dict[str, str]:
        """What in the run's files the guarantee does not cover, and why."""
        checkpoint = {"checkpoint.pt": KEY_NOTE} if RunFolder(self.path).checkpoint.exists() else {}
        return {**self.record.get("not_private", {}), **checkpoint}


def read_run(path: Path, head: str | None = None) -> RunReport:
    """The run in a folder, which may be named by its `run.json`, or a ledger file. With `head`, the ledger must contain
    everything up to that hash.

    Raises `DamagedFile` for a ledger that is damaged or edited, missing or shorter than `run.json` says, and for a plan
    that its events contradict.
    """
    if path.name == "run.json" and path.is_file():
        path = path.parent
    if path.is_dir():
        return _consistent(_read_folder(path, head))
    return _consistent(RunReport(path, read_ledger(path, head=head, torn=True), {}))


def _consistent(found: RunReport) -> RunReport:
    if not found.private:
        return found
    try:
        wrong = _contradiction(found)
    except (KeyError, TypeError) as error:
        raise DamagedFile(
            f"the plan of the run in {found.path} is incomplete. Restore its files from a copy."
        ) from error
    if wrong is not None:
        raise DamagedFile(
            f"the files of the run in {found.path} state another {wrong} than its steps have: they were edited. Restore "
            "them from a copy; do not trust any epsilon of this one."
        )
    return found


def _contradiction(found: RunReport) -> str | None:
    """What the files of a run state in two ways; None if they agree."""
    plan, ledger, record = found.plan, found.ledger, found.record
    wrong = contradicted_field(plan, ledger)
    if wrong is not None:
        return wrong
    if record and found.file:
        stored, stated = found.file.plan, record["plan"]
        for name in sorted(stored.keys() | stated.keys()):
            if stored.get(name) != stated.get(name):
                return name
    planned = ledger if found.file is None else found.file.planned
    too_low = bool(record) and record["metrics"]["epsilon"] < found.spent().epsilon * (1 - PRICING)
    return "epsilon" if too_low or broken_promise(plan, planned) else None


def _read_folder(path: Path, head: str | None) -> RunReport:
    folder = RunFolder(path)
    file, record = folder.read_ledger(), folder.read_record()
    if file is None and (record is None or "plan" not in record):
        raise InvalidArgument(
            f"there is no run in {path}: give a folder with run.json or ledger.jsonl, or a ledger file."
        )
    if head is not None:
        if file is None:
            raise InvalidArgument(f"{path} has no ledger.jsonl to compare with --head.")
        file.position_of(head)
    named = (record or {}).get("ledger_file") or {}
    if file and record and named.get("run") != file.run:
        record = None
    return RunReport(path, file, record or {})
