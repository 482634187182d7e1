"""The body of `clipless audit`."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from clipless.accounting import ACCOUNTANTS
from clipless.app import charts
from clipless.app.auditing import Audit, OnGame
from clipless.app.auditing import audit as run_audit
from clipless.app.charts import drawing
from clipless.app.commands.chosen_data import load_data
from clipless.app.options.data import DataGroup
from clipless.app.settings import AuditSettings, TrainingSettings
from clipless.app.terminal import output
from clipless.app.terminal.progress import PERCENT, progress_bar
from clipless.errors import InvalidArgument

COST = (
    "The audit trained copies of this configuration. Canaries are synthetic, and every number above is about them: nothing "
    "was computed from real records. But real records were trained on, so do not publish a model from an audit, and do not "
    "reuse its seed."
)


def run(
    data: DataGroup,
    columns: Mapping[str, Any],
    settings: TrainingSettings,
    how: AuditSettings,
    *,
    draw: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Play the games, write and show what they found; exit code 1 if the claim is refuted."""
    if draw is not None:
        drawing.drawable(draw)
        charts.figure()  # refuses before the work if nothing can be drawn
    records = load_data(data, **columns)
    with _bars(f"{records.name} {settings.model} {settings.clipping}", visible=not as_json) as report:
        found = run_audit(records, settings, how, report)
    record = _plain(found.to_dict()) | {"note": note_on(found)}
    if out is not None:
        _write(out, record)
    if draw is not None:
        _draw(found, draw)
    if as_json:
        output.show_json(record)
    else:
        _show(found)
    if found.failed:
        raise typer.Exit(1)


@contextmanager
def _bars(title: str, *, visible: bool) -> Iterator[OnGame]:
    """A bar for each game, with the time left."""
    with progress_bar(PERCENT, visible=visible, on_terminal_only=True) as bar:
        tasks: dict[str, Any] = {}

        def report(game: str, done: float) -> None:
            if game not in tasks:
                tasks[game] = bar.add_task(f"{title} {game}", total=1.0)
            bar.update(tasks[game], completed=done)

        yield report


def _show(found: Audit) -> None:
    rows = {
        "claimed epsilon": f"{output.short(found.claimed_epsilon)} ({found.settings.accountant}), delta "
        f"{output.short(found.delta)}",
        "lower bound": f"{found.lower_bound:.3g}, confidence {found.audit.confidence:.3g}",
    }
    for row in found.games:
        count = f"{row['canaries']} canaries" if "canaries" in row else f"{row['games']:,} games"
        rows[row["seen"]] = f"{row['lower_bound']:.3g}, {count}, {row['seconds']} s"
    rows["noise"] = "; ".join(found.findings) or ("as claimed" if "step" in found.audit.games else "not tested")
    rows["verdict"] = "the claim is refuted" if found.failed else "nothing speaks against the claim"
    rows["time"] = f"{found.seconds:.1f} s"
    output.show_table("Audit", rows)
    if (note := note_on(found)) is not None:
        output.show_note(note)
    output.show_note(COST)


def note_on(found: Audit) -> str | None:
    """What to do next where the claim itself may be at fault, and not the training."""
    accountant = found.settings.accountant
    if not (found.exceeded and ACCOUNTANTS[accountant].approximation):
        return None
    return (
        f"{accountant} is an approximation that can state too little: the claim may be false although the training "
        "is sound. Audit with --accountant pld."
    )


def _draw(found: Audit, path: Path) -> None:
    picture, (axes,) = charts.figure()
    names = [row["seen"].replace(", ", ",\n").replace(" of ", "\nof ") for row in found.games]
    bounds = {"lower bound": [_finite(row["lower_bound"], found.claimed_epsilon) for row in found.games]}
    title = f"{found.data}, {found.settings.model}, {found.settings.clipping}: what attacks prove"
    charts.bars(axes, title, "epsilon", names, bounds)
    axes.axhline(found.claimed_epsilon, color="black", linestyle=":", label="claimed")
    axes.legend(fontsize=8, frameon=False)
    charts.save(picture, path)


def _finite(bound: float, claim: float) -> float:
    return min(bound, 4 * claim)


def _plain(value: Any) -> Any:
    """Infinite bounds, which JSON does not have, as "inf"."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return "inf" if isinstance(value, float) and value == float("inf") else value


def _write(path: Path, record: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"cannot write {path} ({error}). Choose another file.") from error
