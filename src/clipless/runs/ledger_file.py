"""The ledger file and how it is read: JSON lines, each with the hash of the one before.

The first line holds the plan; every other line is one event, in order. A line is exactly what `json.dumps` makes of its
fields, so a change of any byte is noticed. A hash chain cannot notice that a file was cut between two lines, or rewritten
from the start: for that, compare with a `head` that was kept elsewhere.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipless import arguments
from clipless.accounting.accountants import accountant_named
from clipless.accounting.events import Event, event_from
from clipless.accounting.ledger import Ledger, Spent
from clipless.errors import CliplessError, DamagedFile, InvalidArgument, TornLedger
from clipless.runs.contradictions import contradicted_header, unplanned_event

FORMAT, VERSION = "clipless-ledger", 1


@dataclass(frozen=True)
class Entry:
    """One event, a fingerprint of what was released (None if unknown), and the hash of its line."""

    event: Event
    fingerprint: str | None
    hash: str


@dataclass(frozen=True)
class LedgerFile:
    """The contents of a ledger file. `torn` has the bytes of an incomplete last line; empty in a sound file."""

    path: Path
    run: str
    delta: float
    accountant: str
    planned: Ledger
    plan: Mapping[str, Any]
    start: str
    entries: tuple[Entry, ...] = ()
    torn: bytes = b""

    @property
    def head(self) -> str:
        """The hash of the last complete line, which vouches for everything before it."""
        return self.hash_at(len(self.entries))

    def hash_at(self, position: int) -> str:
        """The hash of the ledger when it had `position` events."""
        return self.entries[position - 1].hash if position else self.start

    def recorded(self) -> Ledger:
        """Everything in complete lines."""
        ledger = Ledger()
        for entry in self.entries:
            ledger.record(entry.event)
        return ledger

    def ledger(self) -> Ledger:
        """Everything recorded, and one more planned step for a torn line, whose event is unknown."""
        ledger = self.recorded()
        if self.torn:
            ledger.record(self.planned_step(ledger.steps))
        return ledger

    def planned_step(self, number: int) -> Event:
        """The planned event of step `number`, counted from 0; beyond the plan, that of its last step."""
        for event, count in self.planned.events:
            if number < count:
                return event
            number -= count
        return self.planned.events[-1][0]

    def spent(self, delta: float | None = None, accountant: str | None = None) -> Spent:
        """The epsilon of `ledger()`, by default at the plan's delta and by its accountant."""
        return self.ledger().spent(self.delta if delta is None else delta, accountant or self.accountant)

    def position_of(self, head: str) -> int:
        """The number of events after which the ledger had this head. Raises `DamagedFile` if it never had."""
        for position in range(len(self.entries), -1, -1):
            if self.hash_at(position) == head:
                return position
        raise DamagedFile(
            f"{self.path} does not contain the line with hash {head[:16]}…: it was cut short, rewritten, or belongs to "
            "another run. Restore the file that belongs to this hash; do not trust the epsilon of this one."
        )


def read_ledger(path: Path | str, *, head: str | None = None, torn: bool = False) -> LedgerFile:
    """The ledger in a file, every line checked.

    Raises `DamagedFile`, with the number of the line, if the file is not what clipless wrote, and `TornLedger` if a crash
    cut the last line short. With `torn=True` such a line is accepted and counts as one more step. With `head`, a hash
    of this ledger that was kept elsewhere, the file must contain everything up to that hash.
    """
    path = Path(path)
    try:
        found = parse(path, path.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"cannot read the ledger {path} ({error}). Give the path of a ledger.jsonl.") from error
    if head is not None:
        found.position_of(head)
    if found.torn and not torn:
        raise TornLedger(
            f"the last line of {path}, number {len(found.entries) + 2}, is not whole: the run was cut off while writing "
            "it. Resume the run, which completes the line, or count it as one more step (clipless report does)."
        )
    return found


def parse(path: Path, content: bytes) -> LedgerFile:
    """The ledger in these bytes; `path` is for messages."""
    *lines, torn = content.split(b"\n")
    if not lines:
        raise DamagedFile(
            f"line 1 of {path} is not the first line of a ledger: this is no ledger, or it was cut short."
        )
    found = _header(path, _fields(path, 0, "", lines[0]))
    previous, entries = found.start, []
    for number, line in enumerate(lines[1:], start=1):
        entry = _entry(path, number, _fields(path, number, previous, line))
        entries.append(entry)
        previous = entry.hash
    wrong = unplanned_event(found.planned, (entry.event for entry in entries))
    if wrong is not None:
        raise _damaged(path, wrong, "it records something else than the plan in line 1 says")
    return replace(found, entries=tuple(entries), torn=torn)


def sealed(fields: Mapping[str, object]) -> tuple[bytes, str]:
    """A line with its newline, and its hash, which is that of the fields alone."""
    digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    return json.dumps({**fields, "hash": digest}).encode() + b"\n", digest


def header_line(run: str, delta: float, accountant: str, planned: Ledger, plan: Mapping[str, object]) -> bytes:
    """The first line of a ledger: the plan, and the planned steps."""
    kind = {"format": FORMAT, "version": VERSION, "line": 0, "previous": "", "run": run}
    promise = {"delta": delta, "accountant": accountant, "planned": planned.to_dict(), "plan": plan}
    return sealed({**kind, **promise})[0]


def entry_line(number: int, previous: str, event: Event, fingerprint: str | None) -> tuple[bytes, Entry]:
    """The line for event number `number`, counted from 1, and what will be read from it."""
    place = {"line": number, "previous": previous}
    line, digest = sealed({**place, "kind": event.kind, "event": event.to_dict(), "fingerprint": fingerprint})
    return line, Entry(event, fingerprint, digest)


def _fields(path: Path, number: int, previous: str, line: bytes) -> dict[str, Any]:
    """The fields of a line. Raises `DamagedFile` unless its bytes, hash and place are right."""
    try:
        fields = json.loads(line)
        body = {name: value for name, value in fields.items() if name != "hash"}
        whole = sealed(body) == (line + b"\n", fields["hash"])
    except (ValueError, RecursionError, AttributeError, KeyError):
        whole = False
    if not whole:
        raise _damaged(path, number, "its hash does not fit what it says: it was edited or damaged")
    if (fields.get("line"), fields.get("previous")) != (number, previous):
        raise _damaged(path, number, "it does not follow the line before it: lines are missing, moved or repeated")
    return body


def _header(path: Path, fields: dict[str, Any]) -> LedgerFile:
    if fields.get("format") != FORMAT:
        raise _damaged(path, 0, "it is not the first line of a ledger")
    if fields.get("version") != VERSION:
        raise InvalidArgument(f"{path} has version {fields['version']!r} of the format, this clipless reads {VERSION}.")
    try:
        planned = Ledger.from_dict(fields["planned"])
        run, plan, accountant = fields["run"], fields["plan"], accountant_named(fields["accountant"]).name
        delta = arguments.failure_probability(fields["delta"])
        if not (isinstance(run, str) and isinstance(plan, dict) and len(planned)):
            raise InvalidArgument("a field has the wrong type")
        wrong = contradicted_header(fields, planned)
    except (CliplessError, KeyError, AttributeError) as error:
        raise _damaged(path, 0, f"it does not say what a first line says ({error})") from error
    if wrong is not None:
        raise _damaged(path, 0, f"its plan states another {wrong} than the planned steps have")
    return LedgerFile(path, run, delta, accountant, planned, plan, start=sealed(fields)[1])


def _entry(path: Path, number: int, fields: dict[str, Any]) -> Entry:
    try:
        event, fingerprint = event_from(fields["kind"], fields["event"]), fields["fingerprint"]
        if not (fingerprint is None or isinstance(fingerprint, str)):
            raise InvalidArgument("the fingerprint is not text")
    except (CliplessError, KeyError) as error:
        raise _damaged(path, number, f"it is no event ({error})") from error
    return Entry(event, fingerprint, sealed(fields)[1])


def _damaged(path: Path, number: int, why: str) -> DamagedFile:
    return DamagedFile(
        f"line {number + 1} of {path} is not as clipless wrote it: {why}. Nothing after it can be trusted: restore the "
        "file from a copy."
    )
