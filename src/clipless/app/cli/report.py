"""`clipless report`: what a run promised, what it has spent, and what in its files is not private."""

from pathlib import Path
from typing import Annotated, Any

import typer

from clipless.accounting import APPROXIMATION_NOTE, Spent
from clipless.app.cli import _output
from clipless.app.cli._options import JsonOption
from clipless.app.report import RunReport, read_run
from clipless.errors import InvalidArgument

TORN = 3


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or a ledger file.")],
    head: Annotated[
        str | None, typer.Option(help="A hash of this ledger that was kept elsewhere: it must contain all up to there.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Default: the run's own.")] = None,
    accountant: Annotated[
        str | None, typer.Option(help="pld, rdp, or gdp (an approximation). Default: the run's own.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What a run promised and has spent, from its ledger, and what in its files is not private.

    Exit code 3: the last line of the ledger is torn, as after a crash, and counted as one more step. Exit code 4: the
    ledger is damaged or was edited, and nothing is shown.
    """
    reading = read_run(run, head)
    if not reading.private:
        _show_without_privacy(reading, as_json)
        return
    spent = reading.spent(delta, accountant)
    if as_json:
        _output.show_json(_as_record(reading, spent))
    else:
        _output.show_table(f"Run in {run}", _as_rows(reading, spent))
        for name, why in reading.not_private().items():
            _output.show_note(f"Not private: {name}, {why}.")
    warn(reading, spent, quiet=as_json)


def show_ledger(path: Path, head: str | None, delta: float | None, accountant: str, as_json: bool) -> None:
    """What a run's ledger has spent, for `clipless budget`."""
    reading = read_run(path, head)
    if not reading.private:
        raise InvalidArgument(f"the run in {path} was not private: there is nothing to account for.")
    spent = reading.spent(delta, accountant)
    answer = {**vars(spent), "approximation": spent.approximation, "state": reading.state, "torn": reading.torn}
    if as_json:
        _output.show_json(answer)
    else:
        _output.show_table("Privacy spent", _spent_rows(spent) | {"ledger": reading.state})
    warn(reading, spent, quiet=as_json)


def warn(reading: RunReport, spent: Spent, quiet: bool) -> None:
    """Show on stderr what weakens the numbers; a torn ledger ends with its exit code."""
    if spent.approximation and not quiet:
        _output.show_note(APPROXIMATION_NOTE)
    if reading.torn:
        _output.show_note(
            "The last line of the ledger is torn: the run was cut off while writing it. It counts as a step."
        )
        raise typer.Exit(TORN)


def _spent_rows(spent: Spent) -> dict[str, str]:
    return {
        "epsilon spent": f"{_output.short(spent.epsilon)} ({spent.accountant})",
        "delta": _output.short(spent.delta),
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
        "promised": f"({_output.short(plan['epsilon'])}, {_output.short(plan['delta'])})-DP, {plan['neighbouring']}",
        **_spent_rows(spent),
        **{f"{kind} events": str(count) for kind, count in others.items()},
        **(_search_rows(plan["tuning"]) if "tuning" in plan else _run_rows(plan, spent)),
        "ledger": reading.state,
        **head,
    }


def _run_rows(plan: dict[str, Any], spent: Spent) -> dict[str, str]:
    return {
        "steps": f"{spent.steps} of {plan['steps']}",
        "batches": f"{plan['sampling']}, {plan['expected_batch']} expected of {plan['dataset_size']}",
        "clipping": "; ".join(_clipping_row(phase) for phase in plan["clipping"].get("phases", [plan["clipping"]])),
        "noise": f"multiplier {plan['noise_multiplier']:.4g}, source {plan['noise']}",
        **({"norms": f"estimated by {plan['projections']} random projections"} if "projections" in plan else {}),
    }


def _clipping_row(clipping: dict[str, Any]) -> str:
    steps = f" for {clipping['steps']} steps" if "steps" in clipping else ""
    return f"{clipping['name']}, {clipping['policy']}{steps}"


def _search_rows(search: dict[str, Any]) -> dict[str, str]:
    return {
        "steps": "those of the search, priced as a whole",
        "search": f"{len(search['candidates'])} candidates, chosen by {search['method']}",
        "one run": f"({_output.short(search['run_epsilon'])}, {_output.short(search['run_delta'])})-DP by itself",
    }


def _as_record(reading: RunReport, spent: Spent) -> dict[str, Any]:
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
        "not_private": reading.not_private(),
    }


def _show_without_privacy(reading: RunReport, as_json: bool) -> None:
    if as_json:
        _output.show_json({"private": False, "not_private": {"model.pt": "trained without privacy"}})
    else:
        _output.show_note(f"The run in {reading.path} was trained without privacy: nothing in it is private.")
