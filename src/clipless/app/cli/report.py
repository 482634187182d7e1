"""`clipless report`: what a run promised, what it has spent, and what in its files is not private."""

from pathlib import Path
from typing import Annotated

import typer

from clipless.app import names
from clipless.app.options.common import ACCOUNTANT_HELP, JsonOption, starting


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs, or ledger files.")],
    html: Annotated[
        Path | None, typer.Option(help="Write the report as one page, FILE.html, which needs no network.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="A hash of this ledger that was kept elsewhere: it must contain all up to there.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Default: the run's own.")] = None,
    accountant: Annotated[
        str | None,
        typer.Option(help=f"{ACCOUNTANT_HELP} Default: the run's own.", autocompletion=starting(names.ACCOUNTANTS)),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What a run promised and has spent, from its ledger, and what in its files is not private.

    Several runs are shown one after the other, and on the page of --html side by side. Exit code 3: the last line of a
    ledger is torn, as after a crash, and counted as one more step. Exit code 4: a ledger is damaged or was edited, and
    nothing is shown.
    """
    from clipless.app.commands.report import run

    run(runs, html, head, delta, accountant, as_json=as_json)
