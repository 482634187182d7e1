"""The command line: `clipless train`, `tune`, `budget`, `check`, `audit`, `report`, `bench`, `reproduce`.

Exit codes: 0 done; 1 `check` found a model unsound, `audit` refuted a claim, an engine of clipless failed in `bench`, or a
bug; 2 an argument or a data set was refused; 3 the last line of a ledger is torn, and shown as one more step; 4 a ledger,
checkpoint or run is damaged or was edited, and nothing of it is shown; 130 interrupted; 143 terminated.
"""

import importlib
import os
import sys
from importlib.metadata import version
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from clipless.app.cli import _output
from clipless.app.cli._processes import rank
from clipless.errors import CliplessError, DamagedFile, RankFailed


class CommandEntry(NamedTuple):
    """What the help page shows of a command without importing it. Its function has the same name as its module."""

    summary: str
    example: str


COMMANDS = {
    "train": CommandEntry(
        "Train a model on a data set, test it once an epoch, write run.json and model.pt.",
        "clipless train --data digits --model mlp --clipping auto-s --epsilon 3",
    ),
    "budget": CommandEntry(
        "Epsilon from a noise multiplier, or the noise multiplier for an epsilon, for Poisson-sampled steps.",
        "clipless budget --epsilon 3 --dataset-size 60000 --batch-size 2048 --epochs 40 --delta 1e-5",
    ),
    "check": CommandEntry(
        "How each parameter is handled, and whether the model keeps the promise, on the first records of a data set.",
        "clipless check --model cnn --data digits --clipping auto-s",
    ),
    "audit": CommandEntry(
        "Attack a training configuration and compare the epsilon that the attacks prove with the one that is claimed.",
        "clipless audit --data digits --model linear --clipping auto-s --epsilon 3",
    ),
    "bench": CommandEntry(
        "Time and peak memory of one private training step over plain training, and how both grow.",
        "clipless bench --models mlp,cnn --rounds 20 --no-opacus --scaling none",
    ),
    "tune": CommandEntry(
        "Train a grid of candidates, choose the best by its test, and release it under one total (epsilon, delta).",
        "clipless tune --try lr=0.05,0.1,0.2 --try clipping=auto-s,dc-e --epsilon 3",
    ),
    "report": CommandEntry(
        "What a run promised and has spent, from its ledger, and what in its files is not private.",
        "clipless report --accountant pld runs/digits-mlp-auto-s",
    ),
    "reproduce": CommandEntry(
        "Reproduce a paper's figures and tables beside the published numbers, in one folder.",
        "clipless reproduce --quick auto-fashion",
    ),
}


class _LazyCommands(TyperGroup):
    """Imports the module of a command when the command is run: the help page and `budget` need no torch."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, placeholder and _load_command(placeholder.name or ""), rest


def _load_command(name: str) -> Any:
    function = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(name, epilog=f"Example:  {COMMANDS[name].example}")(function)
    return typer.main.get_command(alone)


def _placeholder() -> None:
    """Stands for a command until it is run."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"clipless {version('clipless')}")
        raise typer.Exit


app = typer.Typer(
    name="clipless",
    cls=_LazyCommands,
    help="Train PyTorch models with differential privacy and no clipping threshold to tune.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for _name, _entry in COMMANDS.items():
    app.command(_name, help=_entry.summary)(_placeholder)


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models with differential privacy and no clipping threshold to tune."""


def main() -> None:
    """Run the command line. What clipless refuses becomes one message on stderr and an exit code, without a traceback."""
    sys.path.insert(0, os.getcwd())  # as `python -m` does, so that --model finds a module in the current folder
    try:
        app()
    except CliplessError as error:
        if rank() == 0 or not isinstance(error, RankFailed):  # the first rank tells what failed elsewhere
            _output.show_error(error)
        sys.exit(4 if isinstance(error, DamagedFile) else 2)
