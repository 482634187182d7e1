"""The command line: `clipless train`, `tune`, `budget`, `check`, `report`, `bench`.

Exit codes: 0 done, 1 a model that `check` found unsound, a way of clipless that failed in `bench`, or a bug, 2 an argument
or a data set that was refused, 3 a ledger whose last line is torn, shown with one step more, 4 a ledger, checkpoint or run
that is damaged or was edited, of which nothing is shown, 130 interrupted, 143 terminated.
"""

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from clipless.cli import _output
from clipless.cli.bench import bench
from clipless.cli.budget import budget
from clipless.cli.check import check
from clipless.cli.report import report
from clipless.cli.train import train
from clipless.cli.tune import tune
from clipless.errors import CliplessError, DamagedFile

app = typer.Typer(
    name="clipless",
    help="Train PyTorch models with differential privacy and no clipping threshold to tune.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"clipless {version('clipless')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models with differential privacy and no clipping threshold to tune."""


app.command(epilog="Example:  clipless train --data digits --model mlp --clipping auto-s --epsilon 3")(train)
app.command(
    epilog="Example:  clipless budget --epsilon 3 --dataset-size 60000 --batch-size 2048 --epochs 40 --delta 1e-5"
)(budget)
app.command(epilog="Example:  clipless check --model cnn --data digits --clipping auto-s")(check)
app.command(epilog="Example:  clipless bench --models mlp,cnn --rounds 20 --no-opacus --scaling none")(bench)
app.command(epilog="Example:  clipless tune --try lr=0.05,0.1,0.2 --try clipping=auto-s,dc-e --epsilon 3")(tune)
app.command(epilog="Example:  clipless report --accountant pld runs/digits-mlp-auto-s")(report)


def main() -> None:
    """Run the command line; what clipless refuses becomes one message on stderr and an exit code, no traceback."""
    sys.path.insert(0, os.getcwd())  # as `python -m` does, so that --model finds a module in the current folder
    try:
        app()
    except CliplessError as error:
        _output.show_error(error)
        sys.exit(4 if isinstance(error, DamagedFile) else 2)
