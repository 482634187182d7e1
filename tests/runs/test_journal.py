"""The ledger on disk: what it keeps, what a crash leaves, and that no change of it makes a run look cheaper."""

import fcntl
import gc
import json
import os
import re
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipless.accounting import Ledger, StepEvent
from clipless.errors import CliplessError, DamagedFile, InvalidArgument, LedgerInUse, Misuse, ReplayDiffers, TornLedger
from clipless.runs.journal import Journal
from clipless.runs.ledger_file import LedgerFile, entry_line, read_ledger, sealed
from syncing import Call, recorded

FIRST, SECOND = StepEvent(0.2, 2.0), StepEvent(0.2, 1.0, (8.0,))
EVENTS = (FIRST, FIRST, FIRST, SECOND, SECOND, SECOND)


def planned() -> Ledger:
    ledger = Ledger()
    ledger.record(FIRST, 3)
    ledger.record(SECOND, 5)
    return ledger


def create(path: Path, past: Ledger | None = None) -> Journal:
    return Journal.create(path, 1e-5, "rdp", planned(), {"steps": 8, "name": "ünï"}, past or Ledger())


def written(path: Path, count: int = len(EVENTS)) -> LedgerFile:
    """A ledger of so many events, closed."""
    journal = create(path)
    for number, event in enumerate(EVENTS[:count]):
        assert journal.record(event, f"print{number}")
    journal.close()
    return read_ledger(path)


def reopened(found: LedgerFile, position: int) -> Journal:
    return Journal.resume(found.path, found.run, position, found.hash_at(position))[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_what_was_recorded_is_read(path: Path) -> None:
    found = written(path)
    assert tuple(entry.event for entry in found.entries) == EVENTS
    assert [entry.fingerprint for entry in found.entries] == [f"print{n}" for n in range(6)]
    assert found.ledger().events == ((FIRST, 3), (SECOND, 3))
    assert found.spent() == found.ledger().spent(1e-5, "rdp")
    assert found.spent(1e-6, "pld").accountant == "pld"
    assert (found.plan, found.torn, found.planned) == ({"steps": 8, "name": "ünï"}, b"", planned())


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_after_a_write_that_failed_nothing_more_is_recorded(
    path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What of the line is on disk is unknown: another line behind it could not be read."""
    journal, real = create(path), os.write
    journal.record(FIRST, "print0")

    def half(descriptor: int, content: bytes) -> int:
        if len(content) < 100:
            raise OSError(28, "no space left")
        return real(descriptor, content[: len(content) // 2])

    def no_sync(descriptor: int) -> None:
        raise OSError(5, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, half if fails == "write" else no_sync)
        with pytest.raises(Misuse, match=r"cannot write to the ledger.*so this step was not released"):
            journal.record(FIRST, "print1")
    content = path.read_bytes()
    for _ in range(2):
        with pytest.raises(Misuse, match="is closed after a failed write or detach"):
            journal.record(FIRST, "print1")
    assert path.read_bytes() == content
    assert read_ledger(path, torn=True).ledger().steps == 2


def test_people_can_read_it(path: Path) -> None:
    written(path)
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (header["format"], header["version"], header["delta"]) == ("clipless-ledger", 1, 1e-5)
    assert [line["line"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["previous"] for line in lines] == [header["hash"], *(line["hash"] for line in lines[:-1])]
    assert lines[0]["event"] == FIRST.to_dict()


def test_every_event_is_in_the_file_when_record_returns(path: Path) -> None:
    journal = create(path)
    for number, event in enumerate(EVENTS):
        journal.record(event, None)
        assert len(read_ledger(path).entries) == journal.position == number + 1
        assert read_ledger(path).head == journal.head
    journal.close()


def test_what_was_recorded_before_is_written_first(path: Path) -> None:
    past = Ledger()
    past.record(FIRST, 2)
    journal = create(path, past)
    journal.record(FIRST, "x")
    journal.close()
    assert [entry.fingerprint for entry in read_ledger(path).entries] == [None, None, "x"]


def test_two_ledgers_are_two_runs(tmp_path: Path) -> None:
    assert written(tmp_path / "a").run != written(tmp_path / "b").run


def test_a_file_that_exists_is_never_overwritten(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(InvalidArgument, match="choose another file"):
        create(path)
    assert path.read_text() == "precious"
    assert os.listdir(path.parent) == [path.name]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="Choose another place"):
        create(tmp_path / "nowhere" / "ledger.jsonl")


# One writer.


def test_a_second_writer_of_the_same_process_is_refused(path: Path) -> None:
    journal = create(path)
    with pytest.raises(LedgerInUse, match="Two runs need two ledgers"):
        reopened(read_ledger(path), 0)
    journal.record(FIRST, None)
    journal.close()
    reopened(read_ledger(path), 1).close()


def test_a_second_process_is_refused_until_the_first_is_killed(path: Path) -> None:
    ready, done = os.pipe()
    child = os.fork()
    if not child:
        journal = create(path)
        journal.record(FIRST, None)
        os.write(done, b"!")
        signal.pause()
    try:
        assert os.read(ready, 1) == b"!"
        found = read_ledger(path)
        with pytest.raises(LedgerInUse):
            reopened(found, 1)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(done)
    journal = reopened(found, 1)
    journal.record(FIRST, None)
    journal.close()
    assert len(read_ledger(path).entries) == 2


def test_a_child_process_neither_writes_nor_keeps_the_lock(path: Path) -> None:
    """A data worker that outlives its killed parent must not block the resumed run."""
    journal = create(path)
    back, front = os.pipe()
    child = os.fork()
    if not child:
        said = b"written"
        try:
            journal.record(FIRST, None)
        except Misuse:
            said = b"refused"
        os.write(front, said)
        signal.pause()
    try:
        assert os.read(back, 7) == b"refused"
        journal.record(FIRST, None)
        journal.close()
        reopened(read_ledger(path), 1).close()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(back)
        os.close(front)


def test_a_forgotten_journal_gives_its_lock_back(path: Path) -> None:
    journal = create(path)
    found = read_ledger(path)
    with pytest.raises(LedgerInUse):
        reopened(found, 0)
    del journal
    gc.collect()
    again = reopened(found, 0)
    assert again.record(FIRST, None)
    again.close()
    assert read_ledger(path).ledger().events == ((FIRST, 1),)


# What is on disk, and when.


def test_a_new_ledger_is_synced_before_it_appears_and_its_folder_after(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = Ledger()
    past.record(FIRST, 2)
    calls = recorded(monkeypatch)
    create(path, past).close()
    file, size = path.stat().st_ino, path.stat().st_size
    assert calls == [
        Call("sync file", file, size),
        Call("link", file, size),
        Call("sync folder", path.parent.stat().st_ino, 0),
    ]


def test_every_line_is_synced_before_record_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = create(path)
    calls = recorded(monkeypatch)
    for number, event in enumerate(EVENTS, start=1):
        journal.record(event, None)
        assert len(calls) == number
        assert calls[-1] == Call("sync file", path.stat().st_ino, path.stat().st_size)
    journal.close()
    assert len({call.size for call in calls}) == len(EVENTS)


def test_the_rest_of_a_torn_line_is_synced_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = written(path, 3)
    line, _ = entry_line(4, found.head, SECOND, "print3")
    path.write_bytes(path.read_bytes() + line[:50])
    journal = reopened(found, 3)
    calls = recorded(monkeypatch)
    assert journal.record(SECOND, "print3")
    assert calls == [Call("sync file", path.stat().st_ino, path.stat().st_size)]
    journal.close()


# What a crash leaves.


@pytest.mark.parametrize("kept", [1, 50, -2, -1])
def test_a_torn_last_line_is_told_apart_and_counts_as_a_step(path: Path, kept: int) -> None:
    found = written(path, 3)
    whole = path.read_bytes()
    line, _ = entry_line(4, found.head, SECOND, "print3")
    path.write_bytes(whole + line[:kept])
    with pytest.raises(TornLedger, match="number 5, is not whole"):
        read_ledger(path)
    torn = read_ledger(path, torn=True)
    assert torn.torn == line[:kept]
    assert torn.recorded() == found.ledger()
    assert torn.ledger().events == ((FIRST, 3), (SECOND, 1))
    assert torn.spent().epsilon > found.spent().epsilon


def test_beyond_the_plan_a_torn_line_counts_as_its_last_step(path: Path) -> None:
    found = written(path)
    assert [found.planned_step(n) for n in (0, 2, 3, 7, 8, 99)] == [FIRST, FIRST, SECOND, SECOND, SECOND, SECOND]


def test_a_full_disk_releases_nothing_and_leaves_a_torn_line_at_most(path: Path) -> None:
    """A real limit on the file's size, in a process of its own."""
    found = written(path, 2)
    child = os.fork()
    if not child:
        journal = reopened(found, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40,) * 2)
        refused = 0
        for _ in range(2):
            try:
                journal.record(FIRST, "x")
            except Misuse as error:
                refused += "resume" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    torn = read_ledger(path, torn=True)
    assert (len(torn.entries), len(torn.torn)) == (2, 40)
    assert torn.ledger().steps == 3


def test_a_resumed_run_completes_the_torn_line_it_repeats(path: Path) -> None:
    whole = written(path, 4)
    content = path.read_bytes()
    path.write_bytes(content[:-30])
    journal = reopened(read_ledger(path, torn=True), 3)
    assert journal.record(SECOND, "print3")
    journal.close()
    assert path.read_bytes() == content
    assert read_ledger(path) == whole


@pytest.mark.parametrize(("event", "fingerprint"), [(SECOND, "other"), (FIRST, "print3")])
def test_a_torn_line_that_comes_out_differently_is_refused(path: Path, event: StepEvent, fingerprint: str) -> None:
    written(path, 4)
    content = path.read_bytes()[:-10]
    path.write_bytes(content)
    journal = reopened(read_ledger(path, torn=True), 3)
    with pytest.raises(ReplayDiffers, match="reseed=True"):
        journal.record(event, fingerprint)
    journal.close()
    assert path.read_bytes() == content


def test_zeros_of_a_power_cut_are_a_torn_line(path: Path) -> None:
    found = written(path, 3)
    content = path.read_bytes()
    path.write_bytes(content + b'{"line": 4' + bytes(70))
    assert read_ledger(path, torn=True).ledger().steps == 4
    journal = reopened(found, 3)
    journal.record(SECOND, "print3")
    journal.close()
    assert len(read_ledger(path).entries) == 4


# Repeating.


def test_repeated_events_are_matched_and_not_written_again(path: Path) -> None:
    found = written(path, 5)
    content = path.read_bytes()
    journal = reopened(found, 2)
    assert journal.pending == 3
    for number in (2, 3, 4):
        assert not journal.record(EVENTS[number], f"print{number}")
    assert (journal.pending, journal.position, journal.head) == (0, 5, found.head)
    assert path.read_bytes() == content
    assert journal.record(SECOND, "new")
    journal.close()
    assert len(read_ledger(path).entries) == 6


@pytest.mark.parametrize(("event", "fingerprint"), [(FIRST, "other"), (SECOND, "print2"), (FIRST, None)])
def test_a_repeated_event_that_differs_is_refused(path: Path, event: StepEvent, fingerprint: str | None) -> None:
    journal = reopened(written(path), 2)
    with pytest.raises(ReplayDiffers, match=r"step 3 .* reseed=True"):
        journal.record(event, fingerprint)
    assert (journal.position, journal.pending) == (2, 4)
    journal.close()


def test_steps_without_a_fingerprint_cannot_be_repeated(path: Path) -> None:
    past = Ledger()
    past.record(FIRST, 2)
    create(path, past).close()
    journal = reopened(read_ledger(path), 1)
    with pytest.raises(ReplayDiffers):
        journal.record(FIRST, None)
    journal.close()


@pytest.mark.parametrize("cut", [0, 30])
def test_given_up_steps_stay_counted(path: Path, cut: int) -> None:
    written(path, 5)
    path.write_bytes(path.read_bytes()[: -cut or None])
    found = read_ledger(path, torn=True)
    journal = reopened(found, 1)
    journal.give_up_pending(found)
    assert (journal.pending, journal.position) == (0, 5)
    journal.record(SECOND, "new")
    journal.close()
    after = read_ledger(path)
    assert after.ledger().events == ((FIRST, 3), (SECOND, 3))
    assert after.entries[4].fingerprint == (None if cut else "print4")


@pytest.mark.parametrize(
    ("run", "position", "head", "message"),
    [
        ("other", 3, None, "another run"),
        (None, 7, None, "older than the checkpoint"),
        (None, 3, "0" * 64, "older than the checkpoint or was changed"),
    ],
)
def test_another_ledger_is_refused_and_unlocked(
    path: Path, run: str | None, position: int, head: str | None, message: str
) -> None:
    found = written(path)
    with pytest.raises(InvalidArgument, match=message):
        Journal.resume(path, run or found.run, position, head or found.hash_at(min(position, 6)))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_missing_ledger_is_refused(path: Path) -> None:
    with pytest.raises(InvalidArgument, match="missing"):
        Journal.resume(path, "run", 0, "")
    with pytest.raises(InvalidArgument, match="cannot read"):
        read_ledger(path)


# Damage.


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def other_hash(line: bytes) -> bytes:
    return re.sub(rb'"hash": "(.)', lambda found: b'"hash": "' + (b"1" if found[1] == b"0" else b"0"), line)


CHANGES = {
    "an edited number": (lambda lines: [*lines[:3], lines[3].replace(b"0.2", b"0.1"), *lines[4:]], 4),
    "an edited header": (lambda lines: [lines[0].replace(b"1e-05", b"1e-09"), *lines[1:]], 1),
    "another hash": (lambda lines: [*lines[:2], other_hash(lines[2]), *lines[3:]], 3),
    "a missing line": (lambda lines: lines[:2] + lines[3:], 3),
    "a repeated line": (lambda lines: lines[:3] + lines[2:], 4),
    "exchanged lines": (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], 3),
    "garbage in between": (lambda lines: [*lines[:4], b"garbage\n", *lines[4:]], 5),
    "an empty line": (lambda lines: [*lines, b"\n"], 8),
    "half a line with a newline": (lambda lines: [*lines[:-1], lines[-1][:50] + b"\n"], 7),
    "other spacing": (lambda lines: [*lines[:-1], lines[-1].replace(b": ", b":")], 7),
    "a number that is no object": (lambda lines: [*lines, b"1\n"], 8),
    "deep nesting": (lambda lines: [*lines, b"[" * 100_000 + b"\n"], 8),
    "no header": (lambda lines: lines[1:], 1),
    "nothing": (lambda lines: [], 1),
    "half a header": (lambda lines: [lines[0][:100]], 1),
}


@pytest.mark.parametrize(("change", "line"), CHANGES.values(), ids=CHANGES)
def test_damage_is_named_by_its_line(path: Path, change: object, line: int) -> None:
    written(path)
    path.write_bytes(b"".join(change(lines_of(path))))  # type: ignore[operator]
    for torn in (False, True):
        with pytest.raises(DamagedFile, match=rf"^line {line} of ") as caught:
            read_ledger(path, torn=torn)
        assert not isinstance(caught.value, TornLedger)


def test_a_line_of_another_ledger_does_not_follow(path: Path, tmp_path: Path) -> None:
    """It has the right number, and its hash fits what it says."""
    other = tmp_path / "other.jsonl"
    written(path)
    written(other)
    own, foreign = lines_of(path), lines_of(other)
    for number in (1, 3, 6):
        path.write_bytes(b"".join([*own[:number], foreign[number], *own[number + 1 :]]))
        with pytest.raises(DamagedFile, match=rf"^line {number + 1} of .* does not follow the line before it"):
            read_ledger(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "sneeze"},
        {"event": {**FIRST.to_dict(), "sample_rate": 0.0}},
        {"event": {**FIRST.to_dict(), "gradient_multiplier": "1"}},
        {"event": None},
        {"fingerprint": 3},
    ],
    ids=str,
)
def test_an_event_that_cannot_be_is_refused_even_under_its_own_hash(path: Path, fields: dict[str, object]) -> None:
    found = written(path, 0)
    good = {"line": 1, "previous": found.head, "kind": "step", "event": FIRST.to_dict(), "fingerprint": "x"}
    with path.open("ab") as file:
        file.write(sealed({**good, **fields})[0])
    with pytest.raises(DamagedFile, match="line 2"):
        read_ledger(path)


@pytest.mark.parametrize("fields", [{"delta": 2.0}, {"accountant": "none"}, {"planned": {"events": []}}, {"run": 1}])
def test_a_header_that_cannot_be_is_refused(path: Path, fields: dict[str, object]) -> None:
    written(path, 0)
    header = json.loads(path.read_bytes())
    del header["hash"]
    path.write_bytes(sealed(header | fields)[0])
    with pytest.raises(DamagedFile, match="line 1"):
        read_ledger(path)
    path.write_bytes(sealed(header | {"version": 2})[0])
    with pytest.raises(InvalidArgument, match="version 2"):
        read_ledger(path)


def test_a_head_kept_elsewhere_shows_a_cut_and_a_forgery(tmp_path: Path) -> None:
    path, forged = tmp_path / "ledger", tmp_path / "forged"
    found = written(path)
    assert read_ledger(path, head=found.hash_at(4)).entries == found.entries
    path.write_bytes(b"".join(lines_of(path)[:-1]))
    assert len(read_ledger(path).entries) == 5  # the limit of a chain: a cut between lines looks whole
    with pytest.raises(DamagedFile, match="cut short"):
        read_ledger(path, head=found.head)
    written(forged, 2)
    with pytest.raises(DamagedFile, match="rewritten"):
        read_ledger(forged, head=found.head)


# Fuzzing.


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> tuple[LedgerFile, bytes]:
    found = written(tmp_path_factory.mktemp("truth") / "ledger.jsonl")
    return found, found.path.read_bytes()


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content after one to three accidents or edits."""
    for _ in range(draw(st.integers(1, 3))):
        lines = content.splitlines(keepends=True) or [b""]
        at = draw(st.integers(0, max(0, len(content) - 1)))
        first, second = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
        numbers = [m.span() for m in re.finditer(rb"\d+(\.\d+)?(e-?\d+)?", content)] or [(0, 0)]
        start, stop = draw(st.sampled_from(numbers))
        number = str(draw(st.one_of(st.integers(0, 10**6), st.floats(0, 1e6)))).encode()
        swapped = list(lines)
        swapped[first], swapped[second] = lines[second], lines[first]
        content = draw(
            st.sampled_from(
                [
                    content[:at] + bytes([content[at] ^ (1 << draw(st.integers(0, 7)))]) + content[at + 1 :]
                    if content
                    else b"",
                    content[:at],
                    content[:at] + draw(st.binary(min_size=1, max_size=9)) + content[at:],
                    content[:at] + content[at + draw(st.integers(1, 400)) :],
                    content[:start] + number + content[stop:],
                    b"".join(swapped),
                    b"".join([*lines[:first], lines[second], *lines[first:]]),
                    b"".join(lines[:first] + lines[first + 1 :]),
                    b"".join(lines[: first + 1]),
                ]
            )
        )
    return content


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_change_of_the_bytes_makes_a_run_look_cheaper(truth: tuple[LedgerFile, bytes], data: st.DataObject) -> None:
    """An error, or the truth: exactly what was recorded, up to a cut that the kept head tells; a torn line adds a step."""
    found, original = truth
    content = data.draw(damaged(original))
    path = found.path.with_name("fuzzed.jsonl")
    path.write_bytes(content)
    try:
        read = read_ledger(path, torn=True)
    except CliplessError:
        return
    assert read.entries == found.entries[: len(read.entries)]
    assert (read.run, read.delta, read.planned) == (found.run, found.delta, found.planned)
    assert read.ledger().steps == len(read.entries) + bool(read.torn)
    try:
        checked = read_ledger(path, torn=True, head=found.head)
    except DamagedFile:
        assert len(read.entries) < len(found.entries)
        return
    assert checked.spent().epsilon >= found.spent().epsilon
    assert content.startswith(original)
