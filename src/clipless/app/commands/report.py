"""The body of `clipless report`, and of `clipless budget --ledger`."""

from pathlib import Path
from typing import Any, NamedTuple

import typer

from clipless.accounting import APPROXIMATION_NOTE, Spent
from clipless.app.report import RunReport, read_run
from clipless.app.terminal import output
from clipless.errors import InvalidArgument

TORN = 3


def run(
    runs: list[Path], html: Path | None, head: str | None, delta: float | None, accountant: str | None, *, as_json: bool
) -> None:
    """Show these runs, and write the page if asked to; a torn ledger ends with its exit code."""
    if head is not None and len(runs) > 1:
        raise InvalidArgument("--head is the hash of one ledger: report that run by itself.")
    readings = [read_run(each, head) for each in runs]
    written = None if html is None else _write_page(html, readings, delta, accountant)
    found = [_Found(reading, reading.spent(delta, accountant) if reading.private else None) for reading in readings]
    if as_json:
        records = [_as_record(one) for one in found]
        page = {} if written is None else {"page": str(written)}
        output.show_json((records[0] if len(records) == 1 else {"runs": records}) | page)
    else:
        for one in found:
            _show(one)
        if written is not None:
            typer.echo(f"written: {written}")
    warn(found, quiet=as_json)


class _Found(NamedTuple):
    """A run and what it has spent; None without privacy."""

    reading: RunReport
    spent: Spent | None


def _write_page(html: Path, readings: list[RunReport], delta: float | None, accountant: str | None) -> Path:
    from clipless.app.report_page.page import checked_path, named, write_page

    return write_page(checked_path(html), named(readings), delta, accountant)


def show_ledger(path: Path, head: str | None, delta: float | None, accountant: str, as_json: bool) -> None:
    """What a run's ledger has spent, for `clipless budget`."""
    reading = read_run(path, head)
    if not reading.private:
        raise InvalidArgument(f"the run in {path} was not private: there is nothing to account for.")
    spent = reading.spent(delta, accountant)
    answer = {**vars(spent), "approximation": spent.approximation, "state": reading.state, "torn": reading.torn}
    if as_json:
        output.show_json(answer)
    else:
        output.show_table("Privacy spent", _spent_rows(spent) | {"ledger": reading.state})
    warn([_Found(reading, spent)], quiet=as_json)


def warn(found: list[_Found], quiet: bool) -> None:
    """Show on stderr what weakens the numbers; a torn ledger ends with its exit code."""
    if any(one.spent and one.spent.approximation for one in found) and not quiet:
        output.show_note(APPROXIMATION_NOTE)
    torn = [one.reading for one in found if one.reading.torn]
    for reading in torn:
        which = f"the ledger of {reading.path}" if len(found) > 1 else "the ledger"
        output.show_warning(
            f"The last line of {which} is torn: the run was cut off while writing it. It counts as a step."
        )
    if torn:
        raise typer.Exit(TORN)


def _show(found: _Found) -> None:
    reading, spent = found
    if spent is None:
        output.show_note(f"The run in {reading.path} was trained without privacy: nothing in it is private.")
        return
    output.show_table(f"Run in {reading.path}", _as_rows(reading, spent))
    for note in reading.notes:
        output.show_note(note)
    for name, why in reading.not_private().items():
        output.show_note(f"Not private: {name}, {why}.")


def _spent_rows(spent: Spent) -> dict[str, str]:
    return {
        "epsilon spent": f"{output.short(spent.epsilon)} ({spent.accountant})",
        "delta": output.short(spent.delta),
        "steps": str(spent.steps),
    }


def _as_rows(reading: RunReport, spent: Spent) -> dict[str, str]:
    plan = reading.plan
    others = {event.kind: 0 for event, _ in reading.ledger.events if event.kind != "step"}
    for event, count in reading.ledger.events:
        if event.kind in others:
            others[event.kind] += count
    head = {"run": reading.file.run, "head": reading.file.head} if reading.file else {}
    return {
        "state": reading.progress,
        "promised": f"({output.short(plan['epsilon'])}, {output.short(plan['delta'])})-DP",
        "neighbours": plan["neighbouring"],
        **_spent_rows(spent),
        **{f"{kind} events": str(count) for kind, count in others.items()},
        **(_search_rows(plan["tuning"]) if "tuning" in plan else _run_rows(plan, spent)),
        "ledger": reading.state,
        **head,
    }


def _run_rows(plan: dict[str, Any], spent: Spent) -> dict[str, str]:
    return {
        "steps": f"{spent.steps} of {plan['steps']}",
        "batches": f"{plan['sampling']}, {plan['expected_batch']} expected{_of_size(plan)}",
        "clipping": "; ".join(_clipping_row(phase) for phase in plan["clipping"].get("phases", [plan["clipping"]])),
        "noise": f"multiplier {plan['noise_multiplier']:.4g}, source {plan['noise']}",
        **({"norms": f"estimated by {plan['projections']} random projections"} if "projections" in plan else {}),
    }


def _of_size(plan: dict[str, Any]) -> str:
    size = plan["dataset_size"]
    return f" (rate {plan['sample_rate']:.4g})" if size is None else f" of {size}"


def _clipping_row(clipping: dict[str, Any]) -> str:
    steps = f" for {clipping['steps']} steps" if "steps" in clipping else ""
    return f"{clipping['name']}, {clipping['policy']}{steps}"


def _search_rows(search: dict[str, Any]) -> dict[str, str]:
    return {
        "steps": "those of the search, priced as a whole",
        "search": f"{len(search['candidates'])} candidates, chosen by {search['method']}",
        "one run": f"({output.short(search['run_epsilon'])}, {output.short(search['run_delta'])})-DP by itself",
    }


def _as_record(found: _Found) -> dict[str, Any]:
    reading, spent = found
    if spent is None:
        return {"private": False, "not_private": {"model.pt": "trained without privacy"}}
    file = reading.file
    return {
        "private": True,
        "state": reading.progress,
        "promised": reading.plan,
        "spent": {**vars(spent), "epsilon": str(spent.epsilon) if spent.epsilon == float("inf") else spent.epsilon},
        "approximation": spent.approximation,
        "ledger": {
            "state": reading.state,
            "torn": reading.torn,
            "run": file.run if file else None,
            "position": len(file.entries) if file else None,
            "head": file.head if file else None,
        },
        "notes": reading.notes,
        "not_private": reading.not_private(),
    }
